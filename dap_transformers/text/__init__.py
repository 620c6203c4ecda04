"""Parallel text in any supported format: find files and their languages, and read the pairs."""
