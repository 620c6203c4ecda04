"""Run encoding, search and preparation on a Ray cluster.

Import from the modules of this folder: each needs other libraries, and some are slow to load.
"""
