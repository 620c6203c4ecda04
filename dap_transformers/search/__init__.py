"""Search arrays of vectors: nearest neighbours, retrieval accuracy and hard negatives (xsim++)."""
