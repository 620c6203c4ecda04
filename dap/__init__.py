"""The library of dap-transformers: text, training, encoding, search, mining and publishing."""

__all__ = ["__version__"]
__version__ = "0.1.0"
