"""The shared library of dap-transformers: parallel text, training, encoding, retrieval, analysis."""
