"""The code that a DAP checkpoint carries, which `trust_remote_code=True` loads where this project is not installed."""

import shutil
from pathlib import Path

import configuration_dap
import encoder_dap
import heads_dap
import losses_dap
import modeling_dap
import objectives_dap

CODE = (configuration_dap, losses_dap, encoder_dap, heads_dap, objectives_dap, modeling_dap)


def copy_code(folder: Path) -> None:
    """Put the files that `auto_map` names, and what they import, into a folder."""
    for module in CODE:
        shutil.copyfile(module.__file__, folder / Path(module.__file__).name)
