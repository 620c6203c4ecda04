"""Run encoding, search and preparation on a Ray cluster."""
