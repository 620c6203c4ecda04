"""The shared library of dap-transformers: parallel text, training, encoding, retrieval, analysis.

Every command imports it before all else, so that Ctrl-C ends it in one line while the others are still imported.
"""

import sys
from typing import Any


def _end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """What Python does at the end by an exception, in one line for Ctrl-C; the status is then 130, as shells say."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _end
