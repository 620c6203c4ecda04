"""Measure the CPU time of a training step of each run, for runs of equal CPU time.

    python -m experiments.step_cost experiments/recipes/e5.yaml \\
        --places encoder=e5 data=data links=links --output_dir runs

The finished models of the first seed take turns on batches of the recipe's own text: forward,
backward and AdamW. CPU seconds are counted, because other work on the machine hardly changes them.
For runs of equal total CPU time (`total_time_as`), a training of one step takes the place of the
finished model. It also tells the CPU seconds that the heads cost.
The file `timing.json` is written beside the results, where `experiments.run` looks for it.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from datasets import concatenate_datasets
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from benchmarks.timing import alternate
from dap_transformers.commands.edge import command
from dap_transformers.errors import UserError
from dap_transformers.files import read_object, write_json
from dap_transformers.reports.records import machine, versions
from dap_transformers.text.corpus import load_bitext
from dap_transformers.training.batches import BitextCollator, LanguageMixSampler, tokenize_bitext
from dap_transformers.training.hard_negatives import HardNegatives
from dap_transformers.training.resume import FINISHED
from experiments.recipes import Run, flags, read_recipe
from experiments.run import HEAD_RESULTS, RESULTS, Job, Workspace, execute, parse_places
from modeling_dap import DAPForPreTraining

BATCHES = 8
SAMPLE = 50_000  # pairs that batches are drawn from
#: Arguments that compared runs must share, because their steps use the same batches -> default.
SHARED = {
    "train_data": None,
    "total_train_batch_size": None,
    "max_seq_length": 32,
    "language_mix": "natural",
    "mix_alpha": 0.5,
    "freeze_word_embeddings": False,
    "bf16": False,
}


def compared(workspace: Workspace) -> dict[str, Run]:
    """Return the runs whose step must be timed, because another run gets equal CPU time.

    Returns:
        Name -> run. For each run with `same_time_as`, these are the run that it names and the run
        that it is `like`, unless both are the same. For each run with `total_time_as`, these are
        the run itself and the run that it names.
    """
    found = {}
    runs = workspace.recipe.runs
    for run in runs.values():
        if run.same_time_as not in (None, run.like):
            found[run.same_time_as] = runs[run.same_time_as]
            found[run.like] = runs[run.like]
        if run.total_time_as is not None:
            found[run.total_time_as] = runs[run.total_time_as]
            measured = workspace.recipe.measured_for(run)
            found[measured.name] = measured
    return found


def timed_in_total(workspace: Workspace) -> set[str]:
    """Return the names of the runs whose total CPU time, heads included, must be measured.

    For each run with `total_time_as` these are the run that it names, and the run itself or the one
    that it is `like` (`Recipe.measured_for`).
    """
    names: set[str] = set()
    for run in workspace.recipe.runs.values():
        if run.total_time_as is not None:
            names |= {workspace.recipe.measured_for(run).name, run.total_time_as}
    return names


def one_step_folder(workspace: Workspace, run: Run) -> Path:
    """Return the folder of a model of a run whose heads were trained.

    It is that of the run's first seed if this training has ended. Otherwise the heads and one step
    are trained here, unless that was done before.

    Args:
        workspace: the recipe and its folders.
        run: the run.
    """
    rate = workspace.learning_rate(run)
    if rate is not None:
        ended = workspace.folder(Job(run, run.seeds[0], rate, ()))
        if (ended / FINISHED).is_file():
            return ended
    folder = workspace.runs_dir / workspace.recipe.name / f"{run.name}-one-step"
    if not (folder / FINISHED).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        own = {"max_steps": 1, "warmup_steps": 0, "save_strategy": "no", "output_dir": folder}
        line = [run.command, *flags({**run.arguments, **own})]
        execute(line, folder.with_name(f"{folder.name}.log"), workspace.launcher)
    return folder


def head_seconds(folder: Path) -> float:
    """Return the CPU seconds that trained the heads of the run in a folder. 0 without heads."""
    path = folder / HEAD_RESULTS
    return read_object(path)["cpu_seconds"] if path.is_file() else 0.0


def model_folder(workspace: Workspace, run: Run) -> Path:
    """Return the folder of the finished model of a run's first seed.

    Args:
        workspace: the recipe and its folders.
        run: the run.

    Raises:
        UserError: the search for the learning rate or the training has not ended.
    """
    rate = workspace.learning_rate(run)
    if rate is None:
        raise UserError(
            f"{run.name}: the search for its learning rate has not ended: run experiments.run first"
        )
    folder = workspace.folder(Job(run, run.seeds[0], rate, ()))
    if not (folder / "model.safetensors").is_file():
        raise UserError(f"{folder} has no finished model: run `python -m experiments.run` first")
    return folder


def shared_arguments(runs: Mapping[str, Run]) -> dict[str, Any]:
    """Return the arguments that `SHARED` names, which all compared runs must have in common.

    Args:
        runs: name -> run.

    Returns:
        Name of the argument -> its value.

    Raises:
        UserError: there is nothing to compare, or the runs differ in one of these arguments or
            lack one that has no default.
    """
    found = {
        name: {key: run.arguments.get(key, SHARED[key]) for key in SHARED}
        for name, run in runs.items()
    }
    if not found:
        raise UserError("no run of the recipe has same_time_as, so there is nothing to measure")
    first, arguments = next(iter(found.items()))
    for name, other in found.items():
        for key, value in arguments.items():
            if value is None:
                raise UserError(f"{first} has no {key}: give it, in `train` for one")
            if other[key] != value:
                raise UserError(
                    f"{first} has {key}={value!r}, {name} {other[key]!r}: give both the same"
                )
    return arguments


def batches(
    arguments: dict[str, Any], tokenizer_folder: Path, share: float
) -> list[dict[str, Tensor]]:
    """Draw `BATCHES` batches of the runs' training text.

    Args:
        arguments: result of `shared_arguments`, which says what text and how many pairs.
        tokenizer_folder: folder of a model, whose tokenizer is used.
        share: share of pairs that get a changed copy of the target as a hard negative, 0 to 1.

    Returns:
        The batches, each a dictionary of the model's inputs.
    """
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    given = arguments["train_data"]
    text = load_bitext([given] if isinstance(given, str) else given)
    every = max(1, sum(map(len, text.values())) // SAMPLE)
    sample = {language: part.select(range(0, len(part), every)) for language, part in text.items()}
    rows = tokenize_bitext(sample, tokenizer, arguments["max_seq_length"])
    mix, alpha = arguments["language_mix"], arguments["mix_alpha"]
    negatives = HardNegatives(tokenizer, arguments["max_seq_length"], share, 0) if share else None
    loader = DataLoader(
        concatenate_datasets(list(rows.values())),  # all rows; the sampler draws the mix from them
        batch_size=arguments["total_train_batch_size"],
        sampler=LanguageMixSampler([len(part) for part in rows.values()], mix, alpha, 0),
        collate_fn=BitextCollator(tokenizer.pad_token_id, sorted(rows), negatives),
    )
    found = []
    for batch in islice(loader, BATCHES):
        found.append({key: value for key, value in batch.items() if key != "pair_ids"})
    return found


def training_step(
    folder: Path, frozen: bool, bf16: bool, data: Sequence[dict[str, Tensor]]
) -> Callable[[], None]:
    """Load a model, and return a function that does its next training step on the CPU.

    Args:
        folder: folder of the model.
        frozen: do not train the word embeddings.
        bf16: run under bfloat16 autocast.
        data: batches, which are used in turn.

    Returns:
        A function without arguments: forward and backward pass on the next batch, and AdamW.
    """
    model = DAPForPreTraining.from_pretrained(folder, dtype=torch.float32).train()
    if frozen:
        model.get_input_embeddings().weight.requires_grad_(False)
    trained = [part for part in model.parameters() if part.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)  # the Trainer's own default
    turns = cycle(data)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(**next(turns)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Time a training step of the compared runs, write `timing.json`, and print the times.

    Args:
        argv: command-line arguments. None takes those of the process.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--places", nargs="*", default=[], metavar="NAME=PATH")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs"), help="folder of the models"
    )
    parser.add_argument("--results_dir", type=Path, default=RESULTS, help="folder for timing.json")
    parser.add_argument(
        "--repeats", type=int, default=BATCHES, help=f"steps per run, over {BATCHES} batches"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        help="names of the runs to measure; the costs of the others are kept; default: all",
    )
    args = parser.parse_args(argv)
    recipe = read_recipe(args.recipe, parse_places(args.places))
    workspace = Workspace(recipe, args.output_dir.absolute(), args.results_dir.absolute())
    runs = compared(workspace)
    if args.only:
        runs = {name: run for name, run in runs.items() if name in args.only}
    shared = shared_arguments(runs)
    in_total = timed_in_total(workspace) & set(runs)
    folders = {}
    for name, run in runs.items():
        find = one_step_folder if name in in_total else model_folder
        folders[name] = find(workspace, run)
    heads = {name: head_seconds(folders[name]) for name in in_total}
    shares = {name: run.arguments.get("tr_hard_negatives", 0.0) for name, run in runs.items()}
    data = {
        share: batches(shared, next(iter(folders.values())), share) for share in {*shares.values()}
    }
    frozen = bool(shared["freeze_word_embeddings"])
    bf16 = bool(shared["bf16"])
    steps = {}
    for name, folder in folders.items():
        steps[name] = training_step(folder, frozen, bf16, data[shares[name]])
    found = alternate(steps, args.repeats, "cpu")
    about = {
        "pairs": shared["total_train_batch_size"],
        "machine": machine(),
        "versions": versions(),
    }
    before: dict[str, Any] = {}
    if args.only and workspace.timing.is_file():
        before = read_object(workspace.timing)  # `--only` keeps the other runs' costs
    all_steps = before.get("steps", {}) | found
    all_heads = before.get("heads", {}) | heads
    write_json({"steps": all_steps, "heads": all_heads, **about}, workspace.timing)
    for name, part in found.items():
        print(f"{name}: {part['cpu']:.3f} CPU seconds a step (median of {args.repeats})")
    for name, seconds in heads.items():
        print(f"{name}: {seconds:.0f} CPU seconds for its heads")


if __name__ == "__main__":
    main()
