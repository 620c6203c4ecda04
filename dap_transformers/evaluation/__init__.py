"""Numbers out of an encoder: retrieval, hard negatives, BUCC, word links."""
