"""The shared library of dap-transformers: parallel text, training, encoding, retrieval, analysis."""

import warnings

# `python -m dap.reports.merge`: its folder's `__init__.py` has imported it already, which does no harm.
warnings.filterwarnings("ignore", r"'dap\..* found in sys.modules", RuntimeWarning)
