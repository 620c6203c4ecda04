"""From sentences to vectors: load an encoder, encode, and keep vectors on disk."""
