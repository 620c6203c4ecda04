"""Numbers out of an encoder: retrieval, hard negatives, search, similarity, BUCC, word links."""
