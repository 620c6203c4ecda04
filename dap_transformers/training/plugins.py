"""Load files of users that add objectives of their own."""

import importlib.util
import sys
from functools import cache
from pathlib import Path


@cache
def load_plugin(path: str) -> None:
    """Run a Python file that adds objectives to `objectives_dap.OBJECTIVES`, once per process."""
    spec = importlib.util.spec_from_file_location(f"dap_plugin_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
