"""Trains and evaluates what a recipe says, run by run, and collects a JSON file a run.

    python -m experiments.run experiments/recipes/e5.yaml --places encoder=e5 data=data links=links --output_dir runs

What is done is not done again: a stopped command goes on where it was, within a training too, and several such
commands share the work. `--list` says how far a study is. A run's JSON file keeps its command, configuration,
versions, machine, seed, loss curve and results; it goes to `--results_dir`, models and logs stay in `--output_dir`.
"""

import argparse
import hashlib
import logging
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dap.commands import ClaimedError, claimed, command
from dap.errors import UserError
from dap.file_io import read_object, write_json
from dap.reports import machine, versions
from dap.training import FINISHED
from experiments.recipes import Recipe, Run, flags, read_recipe, words
from experiments.statistics import DEV

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
BEGUN = "begun.json"  # in a run's folder: what trained it, on what machine


@dataclass(frozen=True)
class Job:
    """One training of a recipe and its evaluations."""

    run: Run
    seed: int
    learning_rate: float
    evaluate: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.run.name}-lr{self.learning_rate:g}/seed-{self.seed}"


@dataclass(frozen=True)
class Workspace:
    """A recipe, where its runs live and where their results go."""

    recipe: Recipe
    runs_dir: Path
    results_dir: Path

    def folder(self, job: Job) -> Path:
        return self.runs_dir / self.recipe.name / job.name

    def result(self, job: Job) -> Path:
        return self.results_dir / self.recipe.name / f"{job.name}.json"

    @property
    def timing(self) -> Path:
        """Where `experiments.timing` says what a step costs."""
        return self.results_dir / self.recipe.name / "timing.json"

    # ---------------------------------------------------------------------------------------- what to do

    def jobs(self, run: Run) -> Iterator[Job]:
        """The trainings of a run that can be named by now: the search's, then those of the chosen rate by seed."""
        if run.is_past:
            return
        for rate in self.recipe.learning_rates if run.is_searched else ():
            yield Job(run, run.seeds[0], rate, ())
        if (rate := self.learning_rate(run)) is not None:
            for seed in run.seeds:
                yield Job(run, seed, rate, run.evaluate)

    def learning_rate(self, run: Run) -> float | None:
        """What the recipe says, or the best of its search; None while that has not ended."""
        return self.recipe.learning_rate(run, self.score)

    def score(self, run: Run, rate: float) -> float | None:
        """The accuracy on held-out pairs that chooses learning rates; None for a training that has not ended."""
        job = Job(run, run.seeds[0], rate, ())
        folder = self.folder(job)
        if not (folder / FINISHED).is_file():
            return None
        path = folder / "eval_results.json"
        if not path.is_file():
            raise UserError(
                f"{job.name} has no {DEV}, which chooses learning rates: give dev_pairs above 0"
            )
        return read_object(path)[DEV]

    def arguments(self, job: Job) -> dict[str, Any]:
        """The arguments of the training command, but for its folder.

        A run of the same time has as many steps as `experiments.timing` found those of `same_time_as` to be worth.
        """
        own = dict(job.run.arguments) | {
            "learning_rate": job.learning_rate,
            "seed": job.seed,
            "data_seed": job.seed,
        }
        like, timed = job.run.like, job.run.same_time_as
        if timed not in (None, like):
            steps = read_object(self.timing)["steps"] if self.timing.is_file() else {}
            if lacking := {timed, like} - set(steps):
                raise UserError(
                    f"{self.timing} tells nothing of {min(lacking)}: python -m experiments.timing writes it"
                )
            own["max_steps"] = round(own["max_steps"] * (steps[timed]["cpu"] / steps[like]["cpu"]))
        return own

    # ---------------------------------------------------------------------------------------- doing it

    def state(self, job: Job) -> str:
        """How far a training is: "open", "begun", "trained, without ..." evaluations, "not collected", "done".

        One that failed is "begun", too, and "not collected" is also one whose result is of other trainings or
        evaluations than those that lie in its folder.
        """
        folder = self.folder(job)
        if not (folder / FINISHED).is_file():
            return "begun" if folder.is_dir() else "open"
        if left := [name for name in job.evaluate if not evaluation(folder, name).is_file()]:
            return "trained, without " + " ".join(left)
        result = self.result(job)
        known = read_object(result) if result.is_file() else {}
        return "done" if known == known | self.measured(job) else "not collected"

    def carry_out(self, job: Job) -> None:
        """Train, evaluate and collect, as far as that is not done.

        Raises:
            ClaimedError: another process is at work on it.
            RuntimeError: a command failed.
            ValueError: a damaged file, or nothing tells how long a step takes.
        """
        folder = self.folder(job)
        with claimed(
            folder.with_name(f"{folder.name}.job")
        ):  # the command claims the folder itself
            if not (folder / FINISHED).is_file():
                arguments = self.arguments(job)
                self.begin(job, arguments)
                execute(
                    [job.run.command, *flags(arguments | {"output_dir": folder})],
                    folder / "train.log",
                )
            for name in job.evaluate:
                result = evaluation(folder, name)
                if not result.is_file():
                    result.parent.mkdir(exist_ok=True)
                    places = {"model": folder, "result": result, "folder": result.parent}
                    line = words(self.recipe.evaluate[name], {**self.recipe.places, **places})
                    execute(line, folder / f"{name}.log")
            if self.state(job) != "done":  # another process may have done it all meanwhile
                about = {"recipe": self.recipe.name, "run": job.run.name, "seed": job.seed}
                about |= {"learning_rate": job.learning_rate} | read_object(folder / BEGUN)
                write_json(about | self.measured(job), self.result(job))

    def begin(self, job: Job, arguments: Mapping[str, Any]) -> None:
        """Writes down what trains a model, unless it goes on from a checkpoint of a command that has done so."""
        path = self.folder(job) / BEGUN
        if not path.is_file() or not any(path.parent.glob("checkpoint-*")):
            about = {
                "command": [job.run.command, *flags(arguments)],
                "commit": commit(),
                "machine": machine(),
                "versions": versions(),
                "encoder": digest_of_weights(arguments.get("model_name_or_path")),
            }
            write_json(about, path)

    def measured(self, job: Job) -> dict[str, Any]:
        """What a finished training and its evaluations left in their folder."""
        folder = self.folder(job)
        found = {name: evaluation(folder, name) for name in self.recipe.evaluate}
        dev = folder / "eval_results.json"
        told = read_object(dev) if dev.is_file() else {}
        return {
            "record": read_object(folder / "run.json"),
            "config": read_object(folder / "config.json"),
            "train": read_object(folder / FINISHED),
            "dev": {
                name: told[name] for name in told if name == DEV or name.startswith("eval_rtl_")
            },
            "curve": [
                line
                for line in read_object(folder / "trainer_state.json")["log_history"]
                if "loss" in line
            ],
            "evaluations": {
                name: read_object(path) for name, path in found.items() if path.is_file()
            },
        }


def evaluation(folder: Path, name: str) -> Path:
    """Where the result of an evaluation lies in a training's folder."""
    return folder / name / f"{name}.json"


def commit(checkout: Path = ROOT) -> str | None:
    """The commit of a checkout, by default this one, with "-dirty" where its code or recipes are others by now.

    None for a folder that is no checkout, or where there is no git.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=checkout, capture_output=True, text=True, check=True
        ).stdout

    try:
        top, name = git("rev-parse", "--show-toplevel", "HEAD").splitlines()
        changes = git("status", "--porcelain", "--", "*.py", "*.yaml")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    if Path(top).resolve() != checkout.resolve():
        return None  # a copy within another project's checkout has not that one's commit
    return name + "-dirty" * bool(changes)


def digest_of_weights(encoder: str | None) -> str | None:
    """What tells two encoders apart that lay in one folder; None for one that is no folder with safetensors."""
    path = Path(encoder or "", "model.safetensors")
    if encoder is None or not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def execute(arguments: Sequence[str], log: Path) -> None:
    """Runs one of the project's scripts or modules and adds what it prints to a log.

    Raises:
        RuntimeError: it failed; names the log.
    """
    line = [sys.executable, *arguments]
    if not (ROOT / arguments[0]).is_file():  # a module, such as `experiments.alignment`
        line = [sys.executable, "-m", *arguments]
    with log.open("a", encoding="utf-8") as file:
        print("$", shlex.join(line), file=file, flush=True)
        outcome = subprocess.run(line, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False)
    if outcome.returncode:
        raise RuntimeError(f"{arguments[0]} ended with status {outcome.returncode}: see {log}")


def in_order(workspace: Workspace, only: Sequence[str] | None) -> list[Job]:
    """All jobs that can be named, each once: first what evaluates nothing, such as a search; a seed of all by seed."""
    runs = [run for name, run in workspace.recipe.runs.items() if not only or name in only]
    jobs = {
        job.name: job for run in runs for job in workspace.jobs(run)
    }  # the chosen rate's is of the search, too
    return sorted(jobs.values(), key=lambda job: (bool(job.evaluate), job.seed))


def work(workspace: Workspace, only: Sequence[str] | None) -> list[str]:
    """Carries out everything that can be; what another process is at work on is left to it. Returns what failed."""
    failed: list[str] = []
    tried: list[Job] = []
    while left := [
        job for job in in_order(workspace, only) if job not in tried
    ]:  # as a search names more
        job, started = left[0], time.perf_counter()
        tried.append(job)
        try:
            if workspace.state(job) != "done":
                workspace.carry_out(job)
                logger.info("%s: %.0f s", job.name, time.perf_counter() - started)
        except ClaimedError as reason:
            logger.info("%s is left to another process: %s", job.name, reason)
        except (RuntimeError, ValueError, OSError) as reason:
            failed.append(f"{job.name}: {reason}")
    return failed


def parse_places(given: Sequence[str]) -> dict[str, str]:
    """`["data=d"]` as absolute paths by name; raises `ValueError` for what is not NAME=PATH."""
    if wrong := [place for place in given if "=" not in place]:
        raise UserError(f"--places {wrong[0]}: give NAME=PATH")
    return {
        name: str(Path(path).absolute()) for name, path in (place.split("=", 1) for place in given)
    }


@command
def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "recipe", help="YAML file; those of the project are in experiments/recipes/"
    )
    parser.add_argument(
        "--places", nargs="*", default=[], metavar="NAME=PATH", help="what the recipe has in braces"
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs"), help="models, logs and checkpoints"
    )
    parser.add_argument("--results_dir", type=Path, default=RESULTS, help="a JSON file a run")
    parser.add_argument("--only", nargs="+", help="names of runs")
    parser.add_argument(
        "--list", action="store_true", help="say how far each training is, and do nothing"
    )
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    recipe = read_recipe(args.recipe, parse_places(args.places))
    if unknown := sorted(set(args.only or ()) - set(recipe.runs)):
        raise UserError(f"--only {unknown[0]}: {args.recipe} has {', '.join(recipe.runs)}")
    workspace = Workspace(recipe, args.output_dir.absolute(), args.results_dir.absolute())
    if args.list:
        for job in in_order(workspace, args.only):
            print(f"{job.name}: {workspace.state(job)}")
    elif failed := work(workspace, args.only):
        sys.exit("\n".join(f"error: {each}" for each in failed))


if __name__ == "__main__":
    main()
