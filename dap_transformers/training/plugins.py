"""Load files of users that add objectives of their own."""

import importlib.util
import sys
from pathlib import Path


def load_plugin(path: str | Path) -> None:
    """Run a Python file that adds objectives to `objectives_dap.OBJECTIVES`.

    A file that this process has run already is not run again. Errors of the file's code keep their
    traceback.
    """
    path = Path(path).resolve()
    module_name = f"dap_plugin_{path.stem}"
    known = sys.modules.get(module_name)
    if known is not None and known.__file__ == str(path):
        return
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
