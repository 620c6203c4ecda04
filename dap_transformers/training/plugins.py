"""Load files of users that add objectives of their own, whose options then are arguments."""

import dataclasses
import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

from configuration_dap import DAPConfig
from dap_transformers.errors import UserError
from dap_transformers.training.arguments import GROUPS, config_argument
from objectives_dap import OBJECTIVES


@cache
def load_plugin(path: str) -> None:
    """Run a Python file that adds objectives to `objectives_dap.OBJECTIVES`, once per process.

    Raises:
        UserError: if it replaces an objective, or if an option has the name of an argument, of a
            field of `DAPConfig`, or of another plug-in's option.
    """
    before = dict(OBJECTIVES)
    name = f"dap_plugin_{Path(path).stem}"
    loader = SourceFileLoader(name, path)
    module = module_from_spec(spec_from_loader(name, loader))
    sys.modules[name] = module
    loader.exec_module(module)

    taken = {field for each in (*GROUPS, DAPConfig) for field in each.__dataclass_fields__}
    for name, kind in OBJECTIVES.items():
        if before.get(name, kind) is not kind:
            raise UserError(f"{path} replaces the objective {name}: give yours another name")
        for option in kind.default_fields():
            if option in taken:
                raise UserError(f"{path}: --{option} exists already, so give it another name")
            taken.add(option)


def plugin_arguments(paths: Sequence[str]) -> type:
    """Load plug-ins. Return a dataclass of their weights and options, for an argument parser."""
    for path in paths:
        load_plugin(path)
    arguments = []
    for objective in OBJECTIVES.values():
        for name, default in objective.default_fields().items():
            is_list = isinstance(default, (list, tuple))
            kind = list[type(default[0])] if is_list else type(default)
            arguments.append(config_argument(name, kind, default))
    group = {"_argument_group_name": "objectives of plug-ins"}
    return dataclasses.make_dataclass("PluginArguments", arguments, namespace=group)
