"""Run encoding, search and preparation on a Ray cluster.

Import from the modules of this folder: each needs other libraries, and some are slow to load.
"""

#: The modules. None is loaded together with this package.
__all__ = ["connection", "ray_encoder", "ray_search"]
