"""Find the nearest neighbours of vectors, exactly or by an approximate index."""
