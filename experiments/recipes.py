"""Recipes: YAML files that say what a study trains and evaluates.

    name: e5
    train: {model_name_or_path: "{encoder}", max_steps: 60}  # arguments that all runs share
    seeds: [0, 1, 2]
    learning_rates: [2.0e-5, 5.0e-5, 1.0e-4]  # searched for every run that gives none
    evaluate: {tatoeba: "eval_retrieval.py --model {model} --output_file {result}"}
    runs:
      tr: {objective: tr}
      dap: {objective: tr+rtl}
      tr-same-time: {like: tr, same_time_as: dap}  # trained for dap's CPU time

- `like` copies another run's arguments, seeds, evaluations, time and chosen learning rate. What the
  run gives itself comes first.
- `total_time_as` names another run. The number of steps is chosen so that the whole training costs
  the CPU time of the other one. Training the heads before the first step is counted in both.
- `seconds` trains a run for so long by the clock, instead of `max_steps`. `experiments.run` first
  measures the seconds of a step in a short training of the run.
- `command` names a script or module that trains instead of train_dap.py and takes its arguments.
- `model` names a ready encoder, which is evaluated without training. The run may also give
  `pooling`, `prefix`, `revision` and `trust_remote_code`. Evaluations name these in braces, such as
  `--model {model} {pooling} {prefix}`, and each becomes its flag and value, or nothing.
- A `past` run has an argument that no longer exists. Its results are shown, but it is not trained.
- Words in braces are places that the command line gives (`--places data=... encoder=...`).
- `places: {encoder: xlm-roberta-base}` gives defaults of places, which may be Hub ids. In an
  evaluation, `{model}`, `{result}` and `{folder}` are those of the run.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dap_transformers.errors import UserError
from dap_transformers.files import read_text

#: How a ready encoder makes a sentence vector. Each is also a place in evaluations.
ENCODER_OPTIONS = ("pooling", "prefix", "revision", "trust_remote_code")
#: Places that a run fills in itself, in its evaluations.
OWN = ("model", "result", "folder", *ENCODER_OPTIONS)
#: Keys of a recipe.
KEYS = ("name", "places", "train", "seeds", "learning_rates", "evaluate", "runs")
#: Keys of a run that are not arguments of its command.
TIMES = ("same_time_as", "total_time_as", "seconds")
SPECIAL = ("like", *TIMES, "seeds", "evaluate", "command", "past", "model")
TRAIN = "train_dap.py"


@dataclass(frozen=True)
class Run:
    """One line of a recipe's `runs`: a model to train once per seed.

    Attributes:
        name: name in the recipe.
        arguments: arguments of the training command, name -> value.
        seeds: seeds to train with.
        evaluate: names of the evaluations of the trained model.
        like: name of the run whose settings and learning rate it copies. None copies no run.
        same_time_as: name of another run. The number of steps is chosen so that the steps cost the
            same CPU time as `max_steps` steps of that run. None leaves `max_steps` unchanged.
        total_time_as: name of another run. The number of steps is chosen so that the whole training
            costs the same CPU time as the whole training of that run. Training the heads before the
            first step is counted in both. None leaves `max_steps` unchanged.
        seconds: wall-clock time of the training, instead of a number of steps. None for a number of
            steps.
        command: script or module that trains.
        is_past: it has an argument that no longer exists, so it is shown but not trained.
        model: ready encoder, a folder or Hub id, that is evaluated without training. Then
            `arguments` holds options of `ENCODER_OPTIONS`.
    """

    name: str
    arguments: Mapping[str, Any]
    seeds: tuple[int, ...]
    evaluate: tuple[str, ...]
    like: str | None = None
    same_time_as: str | None = None
    total_time_as: str | None = None
    seconds: float | None = None
    command: str = TRAIN
    is_past: bool = False
    model: str | None = None

    @property
    def is_searched(self) -> bool:
        """Tell whether the learning rate of this run is searched among the recipe's rates.

        It is not if the run gives a learning rate, is `like` another run, or
        is a ready encoder.
        """
        is_given = self.like is not None or "learning_rate" in self.arguments
        return not is_given and self.model is None


@dataclass(frozen=True)
class Recipe:
    """The runs of a study and how they are evaluated.

    Attributes:
        name: name of the study.
        runs: name -> run.
        evaluate: name of an evaluation -> its command. Words in braces, such as {data}, are filled
            in when it runs: from `places`, and from the run itself ({model}, {result} and others).
        learning_rates: rates that are tried for runs that give none.
        places: name of a place, such as "data" -> path or Hub id that replaces it. Empty if the
            recipe was read without places.
    """

    name: str
    runs: Mapping[str, Run]
    evaluate: Mapping[str, str] = field(default_factory=dict)
    learning_rates: tuple[float, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)

    def measured_for(self, run: Run) -> Run:
        """Return the run whose cost is measured to choose the number of steps of a run.

        This is for runs with `total_time_as`. It is the run itself. If the run is `like` another
        one with the same `total_time_as`, it is that one, so that both take equally many steps.
        """
        other = self.runs[run.like] if run.like is not None else None
        if other is None or other.total_time_as != run.total_time_as:
            return run
        return self.measured_for(other)

    def learning_rate(self, run: Run, score: Callable[[Run, float], float | None]) -> float | None:
        """Choose the learning rate of a run.

        A run that gives a learning rate has that one. A run that is `like` another has the rate of
        the other run. For any other run it is the one of `learning_rates` with the best score.

        Args:
            run: a run of this recipe.
            score: function that returns the score of a run at a learning rate, higher is better. It
                returns None if the score is not known yet.

        Returns:
            The learning rate, or None while a score is missing. 0 for a ready encoder.
        """
        if run.model is not None:
            return 0.0
        if "learning_rate" in run.arguments:
            return float(run.arguments["learning_rate"])
        if run.like is not None:
            return self.learning_rate(self.runs[run.like], score)
        found = {rate: score(run, rate) for rate in self.learning_rates}
        return None if None in found.values() else max(found, key=found.get)


def read_recipe(path: str | Path, places: Mapping[str, str] | None) -> Recipe:
    """Read a recipe, and replace the names in braces ("places") by paths.

    The places of evaluations are replaced later, by `words`.

    Args:
        path: YAML file.
        places: name of a place -> path. They win over the recipe's defaults. None replaces no
            place, to look at a recipe only.

    Returns:
        The recipe, whose runs have all arguments that they take from other runs.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: the file is no recipe, or has an unknown key or a place that is not given. Also
            if a run refers to a run that does not stand above it, or has no learning rate.
    """
    path = Path(path)
    if own := sorted(set(places or ()) & set(OWN)):
        raise UserError(f"--places {own[0]}=...: each run fills that in itself; take another name")
    content = _content(path)
    evaluate = content.pop("evaluate", {})
    defaults = content.pop("places", {})
    if places is not None:
        places = {**defaults, **places}
    if places is not None:
        _filled(evaluate, {**places, **dict.fromkeys(OWN, "")}, path)  # only to find errors early
        content = _filled(content, places, path)
    runs: dict[str, Run] = {}
    for name, own in content["runs"].items():
        runs[name] = _run(name, own or {}, content | {"evaluate": evaluate}, runs, path)
    rates = tuple(map(float, content.get("learning_rates", ())))
    if not rates and (lacking := [name for name, run in runs.items() if run.is_searched]):
        raise UserError(
            f"{path}: {lacking[0]} has no learning_rate, and the recipe no learning_rates to search"
        )
    return Recipe(content.get("name", path.stem), runs, evaluate, rates, dict(places or {}))


def _content(path: Path) -> dict[str, Any]:
    """Read the YAML file of a recipe, and return its content as a dictionary with the key "runs".

    Raises:
        UserError: the file is no valid YAML, lacks `runs`, or has an unknown key.
    """
    try:
        content = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict) or not isinstance(content.get("runs"), dict):
        raise UserError(
            f"{path}: no recipe; give {', '.join(KEYS)}, where `runs` maps names to arguments"
        )
    if unknown := sorted(set(content) - set(KEYS)):
        raise UserError(f"{path}: unknown key {', '.join(unknown)}; a recipe has {', '.join(KEYS)}")
    return content


def _run(
    name: str,
    own: dict[str, Any],
    content: Mapping[str, Any],
    before: Mapping[str, Run],
    path: Path,
) -> Run:
    """Return the run that some lines of the recipe describe.

    What the lines do not give comes from the run that it is `like`, or else from the whole recipe.

    Args:
        name: name of the run.
        own: the run's lines in the recipe, key -> value.
        content: content of the whole recipe.
        before: name -> run, for the runs that stand above this one.
        path: file of the recipe, for error messages.

    Raises:
        UserError: the lines refer to an unknown run or evaluation, or lack a key that another key
            needs.
    """
    for key in ("like", "same_time_as", "total_time_as"):
        if own.get(key) is not None and own[key] not in before:
            raise UserError(f"{path}: {name} is {key} {own[key]}, which must be a run above it")
    if own.get("model") is not None:
        return _ready_encoder(name, own, content, path)
    model = before.get(own.get("like"))
    arguments = dict(model.arguments if model else content.get("train", {}))
    arguments |= {key: value for key, value in own.items() if key not in SPECIAL}
    if own.get("same_time_as") and (model is None or "max_steps" not in arguments):
        needed = "max_steps" if model else "like, the run whose step is timed"
        raise UserError(
            f"{path}: {name} is same_time_as {own['same_time_as']}, which needs {needed}: give it"
        )
    seconds = own.get("seconds", model.seconds if model else None)
    if own.get("same_time_as"):
        seconds = None
    if seconds is not None and not arguments.get("total_train_batch_size"):
        raise UserError(f"{path}: {name} has seconds, which needs total_train_batch_size: give it")
    seeds = model.seeds if model else content.get("seeds", [0])
    evaluate = own.get("evaluate", list(model.evaluate if model else content["evaluate"]))
    return Run(
        name,
        arguments,
        seeds=tuple(own.get("seeds", seeds)),
        evaluate=_known_evaluations(name, evaluate, content, path),
        like=own.get("like"),
        same_time_as=own.get("same_time_as"),
        total_time_as=own.get("total_time_as", model.total_time_as if model else None),
        seconds=seconds,
        command=own.get("command", model.command if model else TRAIN),
        is_past=own.get("past", False),
    )


def _ready_encoder(
    name: str, own: Mapping[str, Any], content: Mapping[str, Any], path: Path
) -> Run:
    """Make the run of a ready encoder from its lines in the recipe, as in `_run`."""
    arguments = {key: value for key, value in own.items() if key not in ("model", "evaluate")}
    if unknown := sorted(set(arguments) - set(ENCODER_OPTIONS)):
        raise UserError(
            f"{path}: {name} names a model, which is not trained: leave {unknown[0]} out, or "
            f"give one of {', '.join(ENCODER_OPTIONS)}"
        )
    evaluate = own.get("evaluate", list(content["evaluate"]))
    return Run(
        name,
        arguments,
        seeds=(0,),
        evaluate=_known_evaluations(name, evaluate, content, path),
        model=own["model"],
    )


def _known_evaluations(
    name: str, evaluate: list[str], content: Mapping[str, Any], path: Path
) -> tuple[str, ...]:
    """Return the names of a run's evaluations. Raise `UserError` if the recipe lacks one."""
    if unknown := sorted(set(evaluate) - set(content["evaluate"])):
        raise UserError(f"{path}: {name} evaluates {unknown[0]}, which the recipe does not define")
    return tuple(evaluate)


def _filled(value: Any, places: Mapping[str, str], path: Path) -> Any:
    """Return a value of YAML with the names in braces replaced by paths, in all of its strings.

    Args:
        value: a string, number, list or dictionary.
        places: name of a place -> path.
        path: file of the recipe, for error messages.

    Raises:
        UserError: a string names a place that is not given, or has a single brace.
    """
    if isinstance(value, dict):
        return {key: _filled(item, places, path) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, places, path) for item in value]
    if not isinstance(value, str):
        return value
    try:
        return value.format(**places)
    except KeyError as error:
        raise UserError(f"{path}: {value!r} needs --places {error.args[0]}=...") from error
    except ValueError as error:
        raise UserError(
            f"{path}: {value!r} has a single brace ({error}): write it twice"
        ) from error


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments, name -> value, as the words of a command line.

    A list gives several values after its flag. None leaves the flag out.

    >>> flags({"objective": "tr", "revision": None, "train_data": ["a", "b"]})
    ['--objective', 'tr', '--train_data', 'a', 'b']
    """
    found: list[str] = []
    for key, value in arguments.items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            found += [f"--{key}", *(str(each) for each in values)]
    return found


def words(text: str, places: Mapping[str, object]) -> list[str]:
    """Split an evaluation's command into words, and replace the names in braces by paths.

    The command is split before places are filled in, so that a path with spaces stays one word. A
    place whose value is a list becomes as many words.

    >>> words("eval.py --model {model} --data {data}/tatoeba", {"model": "m", "data": "my data"})
    ['eval.py', '--model', 'm', '--data', 'my data/tatoeba']
    >>> words("eval.py {pooling} {prefix}", {"pooling": ["--pooling", "cls"], "prefix": []})
    ['eval.py', '--pooling', 'cls']

    Args:
        text: the command, with names of places in braces.
        places: name of a place -> path, or list of words. It must have all names in the command.
    """
    lists = {f"{{{name}}}": each for name, each in places.items() if isinstance(each, list)}
    found = []
    for part in shlex.split(text):
        found += lists[part] if part in lists else [part.format(**places)]
    return found
