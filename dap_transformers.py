"""Import this checkout by the names that an installed wheel has.

`dap_transformers.encoding` is `dap.encoding`, and `dap_transformers.train_dap` is `train_dap`. Both
names stand for the same module object, so that no class exists twice. A wheel has a package of this
name instead of this file (see setup.py).
"""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from dap import __version__

__all__ = ["__version__"]
#: Makes this module a package. `_CheckoutModules` finds what is in it.
__path__: list[str] = []


class _CheckoutModules(MetaPathFinder, Loader):
    """Finds and loads the modules of the checkout by their names in a wheel."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        """Describe a module of ours. Returns None for all others, which Python finds itself."""
        name = _name_in_checkout(fullname)
        found = find_spec(name) if name else None
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return spec_from_loader(fullname, self, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Import the module by its name in the checkout, such as `dap.text`.

        It is then known to Python by this name and by that in `dap_transformers`.
        """
        name = _name_in_checkout(module.__name__)
        sys.modules[module.__name__] = importlib.import_module(name)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of a module, for `python -m`."""
        name = _name_in_checkout(fullname)
        return find_spec(name).loader.get_code(name)


def _name_in_checkout(fullname: str) -> str | None:
    """Return a module's name in the checkout: "dap.text" for "dap_transformers.text".

    Returns None for modules that are not ours.
    """
    package, _, name = fullname.partition(".")
    if package != __name__:
        return None
    if find_spec(f"dap.{name.partition('.')[0]}"):
        return f"dap.{name}"
    return name if Path(__file__).with_name(f"{name}.py").is_file() else None


sys.meta_path.insert(0, _CheckoutModules())
