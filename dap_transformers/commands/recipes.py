"""The command line of a training: a recipe (YAML) and flags, which override it."""

import ast
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml

from dap_transformers.commands.arguments import ArgumentParser
from dap_transformers.errors import UserError, reading
from dap_transformers.training.arguments import CONFIG_FIELDS, GROUPS, Arguments
from dap_transformers.training.plugins import load_plugin
from objectives_dap import OBJECTIVES

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

    Epochs and steps exclude each other, so `--num_train_epochs` sets `max_steps` to -1.

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

    # The default of max_steps would win over the epochs.
    if given("num_train_epochs", argv):
        argv = [*argv, "--max_steps", "-1"]

    parser = ArgumentParser(GROUPS, usage=USAGE)
    parsed = parser.parse_args_into_dataclasses(args=argv, return_remaining_strings=True)
    model, data, training, others = parsed
    for path in model.plugin:
        load_plugin(path)
    model.own_fields = own_fields(others)
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


def own_fields(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of objectives that plug-ins have added, by name.

    `--arc_angle 0.2` becomes `{"arc_angle": 0.2}` for an objective called `arc`. A flag without a
    value is True, and one with several values is a list.

    Args:
        words: what the parser of the command line does not know.
    """
    added = [name for name in OBJECTIVES if f"{name}_weight" not in CONFIG_FIELDS]
    prefixes = tuple(f"{name}_" for name in added)
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        values = [word]
        if word.startswith("--"):
            flag, *values = word[2:].split("=", 1)
            name = flag.replace("-", "_")
            found[name] = []
        if not name.startswith(prefixes):
            raise UserError(f"{word}: there is no such argument")
        found[name] += values
    return {name: value_of(values) for name, values in found.items()}


def value_of(words: Sequence[str]) -> Any:
    """Return what the words after a flag spell: numbers, truth values, lists, or else text.

    >>> value_of(["1e-3"]), value_of(["true"]), value_of(["mean"]), value_of(["64", "128"])
    (0.001, True, 'mean', [64, 128])
    """
    values = []
    for word in words:
        try:
            values.append(ast.literal_eval(word))  # also 1e-3, which YAML takes for text
        except (ValueError, SyntaxError):
            values.append({"true": True, "false": False}.get(word.lower(), word))
    if len(values) > 1:
        return values
    return values[0] if values else True


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
