"""The library of dap-transformers: text, training, encoding, search, mining and publishing."""
