"""Load files of users that add objectives of their own."""

import importlib.util
import sys
from pathlib import Path

from dap_transformers.errors import UserError
from objectives_dap import OBJECTIVES


def load_plugin(path: str | Path) -> None:
    """Run a Python file that adds objectives to `objectives_dap.OBJECTIVES`.

    A file that this process has run already is not run again. Errors of the file's code keep their
    traceback.

    Args:
        path: the file, such as "my_loss.py".
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"--plugin {path}: no such file")
    if path.suffix != ".py":
        raise UserError(f"--plugin {path}: give a Python file, which ends in .py")

    module_name = f"dap_plugin_{path.stem}"
    known = sys.modules.get(module_name)
    if known is not None and known.__file__ == str(path):
        return
    before = dict(OBJECTIVES)
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
        if before == OBJECTIVES:
            raise UserError(
                f"--plugin {path} adds no objective: end it with OBJECTIVES[MyLoss.name] = MyLoss"
            )
    except BaseException:
        del sys.modules[module_name]
        raise
