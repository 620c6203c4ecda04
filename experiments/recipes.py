"""Recipes: what a study trains and evaluates, read from YAML and turned into commands.

    name: e5
    train: {model_name_or_path: "{encoder}", max_steps: 60, ...}   # arguments of train_dap.py that all runs share
    seeds: [0, 1, 2]
    learning_rates: [2.0e-5, 5.0e-5, 1.0e-4]      # searched with the first seed for every run that gives none
    evaluate: {tatoeba: "eval_retrieval.py --model {model} --data_dir {data}/tatoeba --output_file {result}"}
    runs:
      tr: {objective: tr}
      dap: {objective: tr+rtl}
      tr-same-time: {like: tr, same_time_as: dap}  # as many steps as the other's time is worth

`like` takes over another run's arguments and its chosen learning rate. Words in braces are places that the command
line gives (`--places data=... encoder=...`), or `{model}`, `{result}` and `{folder}` of the run itself.
"""

import shlex
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

OWN = ("model", "result", "folder")  # places that a run fills in itself
KEYS = ("name", "train", "seeds", "learning_rates", "evaluate", "runs")
SPECIAL = ("like", "same_time_as", "seeds", "evaluate")  # of a run; everything else goes to train_dap.py


@dataclass(frozen=True)
class Run:
    """One line of a recipe's `runs`: a model to train, once a seed."""

    name: str
    arguments: Mapping[str, Any]  # of train_dap.py
    seeds: tuple[int, ...]
    evaluate: tuple[str, ...]
    like: str | None = None
    same_time_as: str | None = None

    @property
    def is_searched(self) -> bool:
        """Whether its learning rate is to be chosen among the recipe's."""
        return self.like is None and "learning_rate" not in self.arguments


@dataclass(frozen=True)
class Recipe:
    """A study."""

    name: str
    runs: Mapping[str, Run]
    evaluate: Mapping[str, str] = field(default_factory=dict)  # name -> command with places
    learning_rates: tuple[float, ...] = ()


def read_recipe(path: str | Path, places: Mapping[str, str]) -> Recipe:
    """A recipe with its places filled in.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an unknown key, a place that is not given, a run that refers to one that comes later or not at all,
            or a run without a learning rate where none are searched.
    """
    path = Path(path)
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if unknown := sorted(set(content) - set(KEYS)):
        raise ValueError(f"{path}: unknown key {', '.join(unknown)}; a recipe has {', '.join(KEYS)}")
    content = _filled(content, places, str(path))
    runs: dict[str, Run] = {}
    for name, own in content["runs"].items():
        runs[name] = _run(name, own or {}, content, runs, path)
    rates = tuple(map(float, content.get("learning_rates", ())))
    if not rates and (lacking := [name for name, run in runs.items() if run.is_searched]):
        raise ValueError(f"{path}: {lacking[0]} has no learning_rate, and the recipe no learning_rates to search")
    return Recipe(content.get("name", path.stem), runs, content.get("evaluate", {}), rates)


def _run(name: str, own: dict[str, Any], content: Mapping[str, Any], before: Mapping[str, Run], path: Path) -> Run:
    for key in ("like", "same_time_as"):
        if own.get(key) is not None and own[key] not in before:
            raise ValueError(f"{path}: {name} is {key} {own[key]}, which must be a run above it")
    model = before.get(own.get("like"))
    arguments = dict(model.arguments if model else content.get("train", {}))
    arguments |= {key: value for key, value in own.items() if key not in SPECIAL}
    evaluate = own.get("evaluate", list(content.get("evaluate", {})))
    if unknown := sorted(set(evaluate) - set(content.get("evaluate", {}))):
        raise ValueError(f"{path}: {name} evaluates {unknown[0]}, which the recipe does not define")
    seeds = tuple(own.get("seeds", content.get("seeds", [0])))
    return Run(name, arguments, seeds, tuple(evaluate), own.get("like"), own.get("same_time_as"))


def _filled(value: Any, places: Mapping[str, str], where: str) -> Any:
    """The value with the given places in its strings; those of a run stay."""
    if isinstance(value, dict):
        return {key: _filled(item, places, where) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, places, where) for item in value]
    if not isinstance(value, str):
        return value
    wanted = {name for _, name, _, _ in string.Formatter().parse(value) if name}
    if lacking := sorted(wanted - set(places) - set(OWN)):
        raise ValueError(f"{where}: {value!r} needs --places {lacking[0]}=...")
    return value.format(**places, **{name: f"{{{name}}}" for name in OWN})


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments as flags; lists give several values, None leaves the flag out.

    >>> flags({"objective": "tr", "use_cpu": True, "revision": None, "train_data": ["a", "b"]})
    ['--objective', 'tr', '--use_cpu', 'True', '--train_data', 'a', 'b']
    """
    found: list[str] = []
    for key, value in arguments.items():
        if value is not None:
            found += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return found


def command(text: str, folder: Path, model: Path, result: Path) -> list[str]:
    """An evaluation's command, split as a shell does.

    >>> command("eval.py --model {model} --out {result}", Path("r"), Path("m"), Path("r/x.json"))
    ['eval.py', '--model', 'm', '--out', 'r/x.json']
    """
    return [part.format(model=model, result=result, folder=folder) for part in shlex.split(text)]
