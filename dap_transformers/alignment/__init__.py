"""Align the words of a sentence with those of its translation, and draw the alignment."""
