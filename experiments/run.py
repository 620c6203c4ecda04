"""Train and evaluate the runs of a recipe, and keep a JSON file per run.

    python -m experiments.run experiments/recipes/e5.yaml \\
        --places encoder=e5 data=data links=links --output_dir runs

Finished work is not repeated. A stopped command continues where it was, also within a training.
Several commands can share the work of a recipe. `--list` shows the progress.

Models and logs stay in `--output_dir`. The JSON file of a run goes to `--results_dir`. It holds the
command, configuration, versions, machine, seed, losses and results. `experiments.collect` then
merges a study's files.
"""

import argparse
import hashlib
import logging
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dap_transformers.commands.edge import ClaimedError, claimed, command
from dap_transformers.errors import UserError
from dap_transformers.evaluation.paper import PAPER_COST
from dap_transformers.files import read_object, write_json
from dap_transformers.reports.records import machine, versions
from dap_transformers.training.heads import RESULTS_FILE as HEAD_RESULTS
from dap_transformers.training.resume import FINISHED
from experiments.paper_tables import paper_tables
from experiments.recipes import ENCODER_OPTIONS, Recipe, Run, flags, read_recipe, words
from experiments.statistics import DEV

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("runs/results")
#: File in a run's folder that tells what trained it and on which machine.
BEGUN = "begun.json"
#: Objective -> its name in the paper's table of costs.
COST_NAMES = {"tr": "TR", "tr+tlm": "TLM", "tr+rtl": "DAP"}
#: Steps of the short training that measures the seconds of a step, and steps between its log lines.
PROBE_STEPS = 60
PROBE_LOGGING = 20


@dataclass(frozen=True)
class Job:
    """One training of a run, with one seed and one learning rate, and its evaluations.

    Attributes:
        run: the run of the recipe.
        seed: seed of the training.
        learning_rate: peak learning rate of the training.
        evaluate: names of the evaluations to carry out.
    """

    run: Run
    seed: int
    learning_rate: float
    evaluate: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the name of the job, such as "tr-lr5e-05/seed-0": run, learning rate and seed."""
        return f"{self.run.name}-lr{self.learning_rate:g}/seed-{self.seed}"


@dataclass(frozen=True)
class Workspace:
    """A recipe and the folders where its work is done.

    Attributes:
        recipe: the recipe.
        runs_dir: folder for models and logs. Each study has a folder in it.
        results_dir: folder for results. Each study has a folder in it.
        launcher: words that start a training command, such as "accelerate launch". Empty means
            Python.
    """

    recipe: Recipe
    runs_dir: Path
    results_dir: Path
    launcher: tuple[str, ...] = ()

    def folder(self, job: Job) -> Path:
        """Return the path of the folder for a job's model and logs. It need not exist."""
        return self.runs_dir / self.recipe.name / job.name

    def result(self, job: Job) -> Path:
        """Return the path of the JSON file for a job's results. It need not exist."""
        return self.results_dir / self.recipe.name / f"{job.name}.json"

    @property
    def timing(self) -> Path:
        """Return the path of `timing.json`, where `experiments.step_cost` writes a step's cost."""
        return self.results_dir / self.recipe.name / "timing.json"

    # ------------------------------------------------------------------------------ what to do

    def jobs(self, run: Run) -> Iterator[Job]:
        """Yield the jobs of a run that are known so far, whether they are done or not.

        A job is a training with one seed and one learning rate, and its evaluations. First come
        the trainings that search the learning rate, if it is searched. They have no evaluations.
        Once the learning rate is known, a job per seed follows. A `past` run has no jobs.
        """
        if run.is_past:
            return
        if run.is_searched:
            for rate in self.recipe.learning_rates:
                yield Job(run, run.seeds[0], rate, ())
        rate = self.learning_rate(run)
        if rate is not None:
            for seed in run.seeds:
                yield Job(run, seed, rate, run.evaluate)

    def learning_rate(self, run: Run) -> float | None:
        """Return the learning rate of a run, or None while the search for it is not complete."""
        return self.recipe.learning_rate(run, self.score)

    def score(self, run: Run, rate: float) -> float | None:
        """Return the accuracy on held-out pairs of a run's first seed at a learning rate.

        Args:
            run: the run.
            rate: learning rate of the training.

        Returns:
            Accuracy in percent, or None if the training has not ended.

        Raises:
            UserError: the training has ended without measuring held-out pairs.
        """
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

    def arguments(self, job: Job, measures: bool = True) -> dict[str, Any]:
        """Return the arguments of a job's training command (name -> value), without output folder.

        They are the run's arguments in the recipe, with the job's learning rate and seed. If the
        run has a budget of time, `max_steps` is the number of steps that use it up:

        - `same_time_as` names another run. The budget is the CPU time that the other run needs for
          the `max_steps` of the recipe.
        - `total_time_as` names another run. The budget is the CPU time of its whole training. In
          both runs, the CPU time of training the heads before the first step is counted as well
          (`steps_of_total_time`).
        - `seconds` is a budget of wall-clock time.

        For the first two, `experiments.step_cost` has measured the CPU time of a step before. For
        `seconds`, `step_seconds` measures a step by a short training, if that was not done yet.

        Args:
            job: a training of a run.
            measures: whether a short training may be started.

        Raises:
            UserError: the measurement of `experiments.step_cost` is missing, or that of a step that
                must not be measured now. Or the short training failed, or the heads of a run with
                `total_time_as` cost more than the whole training of the other run.
        """
        own = dict(job.run.arguments)
        own["learning_rate"] = job.learning_rate
        own["seed"] = job.seed
        own["data_seed"] = job.seed
        like = job.run.like
        timed = job.run.same_time_as
        if timed not in (None, like):
            steps = read_object(self.timing)["steps"] if self.timing.is_file() else {}
            lacking = {timed, like} - set(steps)
            if lacking:
                raise UserError(
                    f"{self.timing} has no {min(lacking)}: "
                    "python -m experiments.step_cost writes it"
                )
            ratio = steps[timed]["cpu"] / steps[like]["cpu"]
            own["max_steps"] = round(own["max_steps"] * ratio)
        if job.run.total_time_as is not None:
            own["max_steps"] = self.steps_of_total_time(job.run)
        if job.run.seconds is not None:
            if not measures and not self.probe(job.run, ".json").is_file():
                raise UserError("a short training measures a step first")
            own["max_steps"] = max(1, round(job.run.seconds / self.step_seconds(job, own)))
        return own

    def steps_of_total_time(self, run: Run) -> int:
        """Return how many steps give a run the same total CPU time as the run of `total_time_as`.

        The total is the CPU time of training the heads before the first step, plus the CPU time of
        all steps. So a run whose heads cost more takes fewer steps.

        Args:
            run: a run with `total_time_as`.

        Raises:
            UserError: the measurement of `experiments.step_cost` is missing, or the heads cost more
                than the whole training of the other run.
        """
        other = self.recipe.runs[run.total_time_as]
        run = self.recipe.measured_for(run)
        timing = read_object(self.timing) if self.timing.is_file() else {"steps": {}}
        for name in (other.name, run.name):
            if name not in timing["steps"]:
                raise UserError(
                    f"{self.timing} has no {name}: python -m experiments.step_cost writes it"
                )
        step = {name: part["cpu"] for name, part in timing["steps"].items()}
        heads = timing["heads"]
        budget = other.arguments["max_steps"] * step[other.name] + heads[other.name]
        steps = round((budget - heads[run.name]) / step[run.name])
        if steps < 1:
            raise UserError(
                f"{run.name}: its heads cost {heads[run.name]:.0f} s, but {other.name} "
                f"{budget:.0f} s in all: give {other.name} more steps"
            )
        return steps

    def step_seconds(self, job: Job, arguments: Mapping[str, Any]) -> float:
        """Return the wall-clock seconds of a training step of a job's run.

        They are measured once per run, by a short training, and kept in a file. All costs of a step
        count: reading and collating pairs, the optimizer and the log.

        Args:
            job: a job of the run.
            arguments: arguments of the training command.

        Raises:
            UserError: the short training failed.
        """
        path = self.probe(job.run, ".json")
        if not path.is_file():
            folder = self.probe(job.run)
            folder.mkdir(parents=True, exist_ok=True)
            own = {"max_steps": PROBE_STEPS, "logging_steps": PROBE_LOGGING, "save_strategy": "no"}
            line = [job.run.command, *flags({**arguments, **own, "output_dir": folder})]
            execute(line, self.probe(job.run, ".log"), self.launcher)
            log = read_object(folder / "trainer_state.json")["log_history"]
            rates = [entry["pairs_per_second"] for entry in log if "pairs_per_second" in entry]
            seconds = arguments["total_train_batch_size"] / rates[-1]
            write_json({"run": job.run.name, "seconds": seconds, "machine": machine()}, path)
            shutil.rmtree(folder)
        return read_object(path)["seconds"]

    def probe(self, run: Run, ending: str = "") -> Path:
        """Return the path of the short training that measures a step of a run. It need not exist.

        Args:
            run: the run.
            ending: "" for the folder of the training, ".json" for the result, ".log" for the log.
        """
        return self.runs_dir / self.recipe.name / f"{run.name}-probe{ending}"

    # -------------------------------------------------------------------------------- doing it

    def state(self, job: Job) -> str:
        """Return how far a job (a training and its evaluations) is, by the files that are there.

        Returns:
            One of these texts:

            - "open": nothing was done.
            - "begun": the training has begun, and may have failed.
            - "trained, without NAME ...": the named evaluations are missing. For a ready encoder,
              which is not trained, it is "begun, without NAME ...".
            - "not collected": training and evaluations are there, but there is no result file, or
              it belongs to another training or evaluation.
            - "done": the result file is there as well.
        """
        folder = self.folder(job)
        if not (folder / FINISHED).is_file():
            return "begun" if folder.is_dir() else "open"
        left = [name for name in job.evaluate if not evaluation(folder, name).is_file()]
        if left:
            what = "trained" if job.run.model is None else "begun"
            return f"{what}, without {' '.join(left)}"
        result = self.result(job)
        known = read_object(result) if result.is_file() else {}
        return "done" if known == known | self.measured(job) else "not collected"

    def carry_out(self, job: Job) -> None:
        """Do what is left of a job: train, evaluate, and write the result file.

        Nothing is written if all of it was done before.

        Raises:
            ClaimedError: another process works on it.
            UserError: a command failed, a file is damaged, or the cost of a step is not known.
        """
        folder = self.folder(job)
        lock = folder.with_name(f"{folder.name}.job")  # the commands claim the folder itself
        with claimed(lock):
            if not (folder / FINISHED).is_file():
                self.train(job)
            for name in job.evaluate:
                if not evaluation(folder, name).is_file():
                    self.evaluate(job, name)
            if self.state(job) != "done":  # another process may have done it all meanwhile
                about = {
                    "recipe": self.recipe.name,
                    "run": job.run.name,
                    "seed": job.seed,
                    "learning_rate": job.learning_rate,
                }
                about |= read_object(folder / BEGUN)
                write_json(about | self.measured(job), self.result(job))

    def train(self, job: Job) -> None:
        """Run the training command of a job, and append its output to `train.log`.

        A training that was stopped resumes. For a ready encoder there is nothing to train.

        Raises:
            UserError: the command failed, or the cost of a step is not known.
        """
        folder = self.folder(job)
        if job.run.model is not None:
            self.begin(job, {"model_name_or_path": job.run.model})
            write_json({}, folder / FINISHED)
            return
        arguments = self.arguments(job)
        self.begin(job, arguments)
        line = [job.run.command, *flags(arguments | {"output_dir": folder})]
        execute(line, folder / "train.log", self.launcher)

    def evaluate(self, job: Job, name: str) -> None:
        """Run one evaluation of a job's model, and append its output to `NAME.log`.

        Args:
            job: the job, whose training has ended.
            name: name of the evaluation in the recipe.

        Raises:
            UserError: the command failed.
        """
        folder = self.folder(job)
        evaluation(folder, name).parent.mkdir(exist_ok=True)
        execute(self.evaluation_command(job, name), folder / f"{name}.log")

    def evaluation_command(self, job: Job, name: str) -> list[str]:
        """Return the command of a job's evaluation as a list of words: a script and its arguments.

        Args:
            job: the job.
            name: name of the evaluation in the recipe.
        """
        folder = self.folder(job)
        result = evaluation(folder, name)
        places: dict[str, Any] = {"model": folder, "result": result, "folder": result.parent}
        places |= dict.fromkeys(ENCODER_OPTIONS, [])  # a trained model has its own
        if job.run.model is not None:
            places["model"] = job.run.model
            for option, value in job.run.arguments.items():
                places[option] = flags({option: value})
        return words(self.recipe.evaluate[name], {**self.recipe.places, **places})

    def begin(self, job: Job, arguments: Mapping[str, Any]) -> None:
        """Write what trains a model into the job's folder, as the file `BEGUN`.

        It has the command, commit, machine, library versions and a hash of the encoder's weights.
        If the training resumes from a checkpoint, the earlier file is kept.

        Args:
            job: the job that is about to train.
            arguments: arguments of the training command.
        """
        path = self.folder(job) / BEGUN
        if path.is_file() and any(path.parent.glob("checkpoint-*")):
            return
        is_trained = job.run.model is None
        about = {
            "command": [job.run.command, *flags(arguments)] if is_trained else None,
            "commit": commit(),
            "machine": machine(),
            "versions": versions(),
            "encoder": digest_of_weights(arguments.get("model_name_or_path")),
        }
        write_json(about, path)

    def measured(self, job: Job) -> dict[str, Any]:
        """Read what a finished training and its evaluations left in the job's folder.

        Returns:
            "record" (the training's arguments), "config" (of the model), "train" (summary of the
            training), "dev" (results on held-out pairs, may be empty), "heads" (results of training
            the heads, may be empty), "curve" (log lines with a loss) and "evaluations" (name of
            each finished evaluation -> its report). A ready encoder only has "evaluations".
        """
        folder = self.folder(job)
        evaluations = {}
        for name in self.recipe.evaluate:
            result = evaluation(folder, name)
            if result.is_file():
                evaluations[name] = read_object(result)
        if job.run.model is not None:
            return {"evaluations": evaluations}
        path = folder / "eval_results.json"
        dev = {}
        for name, value in (read_object(path) if path.is_file() else {}).items():
            if name == DEV or name.startswith(("eval_rtl_", "eval_bow_")):
                dev[name] = value
        log = read_object(folder / "trainer_state.json")["log_history"]
        heads = folder / HEAD_RESULTS
        return {
            "record": read_object(folder / "run.json"),
            "config": read_object(folder / "config.json"),
            "train": read_object(folder / FINISHED),
            "dev": dev,
            "heads": read_object(heads) if heads.is_file() else {},
            "curve": [line for line in log if "loss" in line],
            "evaluations": evaluations,
        }


def evaluation(folder: Path, name: str) -> Path:
    """Return the path of an evaluation's result file. It need not exist.

    Args:
        folder: folder of the job's model.
        name: name of the evaluation in the recipe.
    """
    return folder / name / f"{name}.json"


def commit(checkout: Path = ROOT) -> str | None:
    """Return the commit of a git checkout, so that a result says which code made it.

    Args:
        checkout: folder of the checkout.

    Returns:
        The hash of the commit, with "-dirty" behind it if a .py or .yaml file has changed since.
        None if the folder is not the top of a checkout, or if git is not installed.
    """

    def git(*arguments: str) -> str:
        line = ["git", *arguments]
        done = subprocess.run(line, cwd=checkout, capture_output=True, text=True, check=True)
        return done.stdout

    try:
        top, name = git("rev-parse", "--show-toplevel", "HEAD").splitlines()
        changes = git("status", "--porcelain", "--", "*.py", "*.yaml")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    if Path(top).resolve() != checkout.resolve():
        return None  # a copy inside another project's checkout
    return name + "-dirty" if changes else name


def digest_of_weights(encoder: str | None) -> str | None:
    """Return a hash of an encoder's weights, because another one may lie in the folder later.

    Args:
        encoder: folder or Hub id. None if the training names no encoder.

    Returns:
        12 hexadecimal digits, or None for anything but a folder with `model.safetensors`.
    """
    path = Path(encoder or "", "model.safetensors")
    if encoder is None or not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def command_line(arguments: Sequence[str], launcher: Sequence[str]) -> list[str]:
    """Return the words that start one of the project's scripts or modules.

    Args:
        arguments: script or module, and the arguments of its command line.
        launcher: words that start the script, such as "python".
    """
    # A module is named as in experiments.measure_alignment.
    is_script = (ROOT / arguments[0]).is_file()
    return [*launcher, *([] if is_script else ["-m"]), *arguments]


def execute(arguments: Sequence[str], log: Path, launcher: Sequence[str] = ()) -> None:
    """Run one of the project's scripts or modules, and append its output to a log.

    Args:
        arguments: script or module, and the arguments of its command line.
        log: file to append the command line and the output to.
        launcher: words that start the script. Empty means Python.

    Raises:
        UserError: it failed. The message names the log.
    """
    line = command_line(arguments, launcher or [sys.executable])
    with log.open("a", encoding="utf-8") as file:
        print("$", shlex.join(line), file=file, flush=True)
        outcome = subprocess.run(line, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False)
    if outcome.returncode:
        raise UserError(f"{arguments[0]} ended with status {outcome.returncode}: see {log}")


def in_order(workspace: Workspace, only: Sequence[str] | None) -> list[Job]:
    """Return all jobs that are known so far, each once, in the order in which they are carried out.

    Jobs without an evaluation (learning rate searches) come first, then all runs of a seed, seed by
    seed.

    Args:
        workspace: the recipe and its folders.
        only: names of the runs whose jobs are returned. None takes all runs.
    """
    jobs = {}
    for name, run in workspace.recipe.runs.items():
        if not only or name in only:
            for job in workspace.jobs(run):
                jobs[job.name] = job  # the chosen rate's job replaces that of the search
    return sorted(jobs.values(), key=lambda job: (bool(job.evaluate), job.seed))


def work(workspace: Workspace, only: Sequence[str] | None) -> list[str]:
    """Carry out all jobs that are not done and that no other process works on.

    Jobs that become known meanwhile, because a learning rate was found, are carried out as well. A
    job that fails does not stop the others.

    Args:
        workspace: the recipe and its folders.
        only: names of the runs to carry out. None takes all runs.

    Returns:
        A line per job that failed, with its name and the reason.
    """
    failed: list[str] = []
    tried: list[Job] = []
    while True:
        left = [job for job in in_order(workspace, only) if job not in tried]
        if not left:
            return failed
        job = left[0]  # asked for anew each time, because a finished search adds jobs
        started = time.perf_counter()
        tried.append(job)
        try:
            if workspace.state(job) != "done":
                workspace.carry_out(job)
                logger.info("%s: %.0f s", job.name, time.perf_counter() - started)
        except ClaimedError as reason:
            logger.info("%s is left to another process: %s", job.name, reason)
        except (ValueError, OSError) as reason:
            failed.append(f"{job.name}: {reason}")


def dry_run(workspace: Workspace, only: Sequence[str] | None) -> None:
    """Print the commands of all jobs that are known so far, with steps and expected hours.

    The hours are the pairs of a training times the paper's milliseconds per pair (Table 6), which
    were measured on 8 V100. A job whose number of steps depends on a measurement that is missing
    has no training command yet.

    Args:
        workspace: the recipe and its folders.
        only: names of the runs. None takes all runs.
    """
    total = 0.0
    for job in in_order(workspace, only):
        if job.run.model is not None:
            print(f"# {job.name}: {workspace.state(job)}, evaluation of {job.run.model}")
            print_evaluations(workspace, job)
            continue
        try:
            arguments = workspace.arguments(job, measures=False)
        except UserError as reason:
            print(f"# {job.name}: {workspace.state(job)}, steps not known yet: {reason}")
            print_evaluations(workspace, job)
            continue
        cost = PAPER_COST.get(COST_NAMES.get(arguments.get("objective", "tr+rtl"), ""))
        steps = arguments.get("max_steps", 0)
        expected = "unknown time"
        if cost is not None:
            pairs = steps * arguments.get("total_train_batch_size", 0)
            hours = pairs * cost[1] / 1000 / 3600
            total += hours
            expected = f"{hours:.1f} hours"
        print(f"# {job.name}: {workspace.state(job)}, {steps} steps, {expected}")
        line = [job.run.command, *flags(arguments | {"output_dir": workspace.folder(job)})]
        print(shlex.join(command_line(line, workspace.launcher or ["python"])))
        print_evaluations(workspace, job)
    if total:
        note = "by the paper's Table 6; without evaluations"
        print(f"# {total:.0f} hours of training on 8 V100, {note}")


def print_evaluations(workspace: Workspace, job: Job) -> None:
    """Print the command of each evaluation of a job."""
    for name in job.evaluate:
        print(shlex.join(command_line(workspace.evaluation_command(job, name), ["python"])))


def read_reports(workspace: Workspace, only: Sequence[str] | None) -> dict[str, Any]:
    """Read the reports of all evaluations that have ended.

    Args:
        workspace: the recipe and its folders.
        only: names of the runs. None takes all.

    Returns:
        Run -> seed -> name of the evaluation -> its report, in the order of the recipe.
    """
    found: dict[str, Any] = {}
    for job in in_order(workspace, only):
        for name in job.evaluate:
            path = evaluation(workspace.folder(job), name)
            if path.is_file():
                seeds = found.setdefault(job.run.name, {})
                seeds.setdefault(job.seed, {})[name] = read_object(path)
    return found


def trained_models(workspace: Workspace, only: Sequence[str] | None) -> dict[str, Path]:
    """Return run -> folder of its model, of the first seed whose training has ended.

    Args:
        workspace: the recipe and its folders.
        only: names of the runs. None takes all.
    """
    models: dict[str, Path] = {}
    for job in in_order(workspace, only):
        folder = workspace.folder(job)
        if job.evaluate and (folder / FINISHED).is_file():
            models.setdefault(job.run.name, folder)
    return models


def parse_places(given: Sequence[str]) -> dict[str, str]:
    """Parse the values of `--places`, such as "data=corpus".

    Returns:
        Name of each place -> its absolute path.

    Raises:
        UserError: an item is not NAME=PATH.
    """
    places = {}
    for item in given:
        name, sign, path = item.partition("=")
        if not sign:
            raise UserError(f"--places {item}: give NAME=PATH")
        places[name] = str(Path(path).absolute())
    return places


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Carry out the jobs of a recipe. Exit with status 1 if a job failed.

    With `--list`, `--dry_run` or `--tables` only print the progress, the commands or the results.

    Args:
        argv: command-line arguments. None takes those of the process.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", help="YAML file, such as those in experiments/recipes/")
    parser.add_argument(
        "--places",
        nargs="*",
        default=[],
        metavar="NAME=PATH",
        help="paths that the recipe names in braces",
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("runs"),
        help="folder for models, logs and checkpoints",
    )
    parser.add_argument(
        "--results_dir", type=Path, default=RESULTS, help="folder for a JSON file per run"
    )
    parser.add_argument("--only", nargs="+", help="names of the runs to carry out; default: all")
    parser.add_argument(
        "--list", action="store_true", help="print how far each training is, and do nothing"
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="print every command, its steps and the expected hours, and do nothing",
    )
    parser.add_argument(
        "--tables",
        action="store_true",
        help="print the paper's tables with the results so far, and do nothing",
    )
    parser.add_argument(
        "--figures",
        type=Path,
        metavar="FOLDER",
        help="draw the paper's Figures 1, 3 and 4 from the results so far, and do nothing",
    )
    parser.add_argument(
        "--launcher",
        default="",
        help="words before a training command instead of python, such as "
        "'accelerate launch --multi_gpu --num_processes 8'",
    )
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.INFO)

    recipe = read_recipe(args.recipe, parse_places(args.places))
    unknown = sorted(set(args.only or ()) - set(recipe.runs))
    if unknown:
        raise UserError(f"--only {unknown[0]}: {args.recipe} has {', '.join(recipe.runs)}")
    launcher = tuple(shlex.split(args.launcher))
    workspace = Workspace(recipe, args.output_dir.absolute(), args.results_dir.absolute(), launcher)
    if args.dry_run:
        dry_run(workspace, args.only)
        return
    if args.tables:
        print("\n\n".join(paper_tables(recipe, read_reports(workspace, args.only))))
    if args.figures:
        from experiments.paper_figures import draw_figures  # loads an encoder, so only where asked

        reports = read_reports(workspace, args.only)
        models = trained_models(workspace, args.only)
        print("\n".join(draw_figures(recipe, reports, models, args.figures)))
    if args.tables or args.figures:
        return
    if args.list:
        for job in in_order(workspace, args.only):
            print(f"{job.name}: {workspace.state(job)}")
        return
    failed = work(workspace, args.only)
    if failed:
        sys.exit("\n".join(f"error: {each}" for each in failed))


if __name__ == "__main__":
    main()
