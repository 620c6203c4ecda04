"""The command line of a training: a recipe (YAML) and flags, which override it."""

import argparse
import json
from collections.abc import Collection
from pathlib import Path

import yaml

from dap_transformers.commands.arguments import ArgumentParser
from dap_transformers.errors import UserError, reading
from dap_transformers.training.arguments import GROUPS, Arguments
from dap_transformers.training.plugins import plugin_arguments

#: Pairs of arguments of which only one may be given. A flag replaces its rival in the recipe.
RIVALS = (
    ("per_device_train_batch_size", "total_train_batch_size"),
    ("max_steps", "num_train_epochs"),
    ("model_name_or_path", "config_name"),
)

#: The folder of the project's recipes.
RECIPES = Path(__file__).parents[1] / "configs"

USAGE = "%(prog)s [RECIPE] --train_data PATH [PATH ...] --output_dir FOLDER [arguments]"


def parse_arguments(argv: list[str]) -> Arguments:
    """Parse the command line of a training.

    Args:
        argv: flags, which may stand after a recipe (`find_recipe`).
    """
    if argv and not argv[0].startswith("-"):
        flags = argv[1:]
        pairs = [*RIVALS, *(pair[::-1] for pair in RIVALS)]
        rivals = {rival for name, rival in pairs if given(name, flags)}
        argv = recipe_flags(find_recipe(argv[0]), without=rivals) + flags
    for first, second in RIVALS:
        if given(first, argv) and given(second, argv):
            raise UserError(f"--{first} and --{second} say the same: give one of them.")

    # The options of plug-ins are arguments, so find these files first.
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--plugin", nargs="+", action="extend", default=[])
    own = plugin_arguments(finder.parse_known_args(argv)[0].plugin)
    parser = ArgumentParser((*GROUPS, own), usage=USAGE)
    model, data, training, options = parser.parse_args_into_dataclasses(args=argv)
    model.own_fields = {name: value for name, value in vars(options).items() if value is not None}
    if model.model_name_or_path is None and model.config_name is None:
        raise UserError(
            "nothing to start from: give --model_name_or_path, or --config_name to begin from "
            "random weights"
        )
    return model, data, training


def find_recipe(name: str) -> Path:
    """Return the path of a recipe's YAML file.

    Args:
        name: path of a YAML file, or the name of a recipe of this project, such as "xlmr". If
            both exist, the path wins.
    """
    path = Path(name)
    if path.is_file():
        return path

    own = {file.stem: file for file in sorted(RECIPES.glob("*.yaml"))}
    if name not in own:
        raise UserError(f"{name}: no such recipe. Give a YAML file, or one of {', '.join(own)}.")
    return own[name]


def given(name: str, argv: list[str]) -> bool:
    """Tell whether a command line has the flag `--name`.

    `--name=value` counts as well, and `-` may stand for `_` within the name.

    Args:
        name: name of the argument without dashes before it, such as "max_steps".
    """
    flags = [argument.split("=", 1)[0].replace("-", "_") for argument in argv]
    return f"__{name}" in flags


def recipe_flags(path: Path, without: Collection[str] = ()) -> list[str]:
    """Convert a recipe to flags: `{"rtl_layers": 2}` becomes `["--rtl_layers", "2"]`.

    A list becomes several values, and a mapping becomes JSON. An argument without a value (null)
    is left out. `no`, which YAML reads as false, becomes "no" again for arguments such as
    `eval_strategy`.
    """
    with reading(path):
        recipe = dict(yaml.safe_load(path.read_text(encoding="utf-8")))
    flags: list[str] = []
    for key, value in recipe.items():
        if value is None or key in without:
            continue
        if value is False and key.endswith("_strategy"):
            # YAML reads a bare `no` as false.
            value = "no"
        if isinstance(value, dict):
            value = json.dumps(value)
        values = value if isinstance(value, list) else [value]
        flags += [f"--{key}", *map(str, values)]
    return flags
