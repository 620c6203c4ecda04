"""Tables of the study show what plain arithmetic gives, and the stored page is up to date."""

import random
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import REPOSITORY
from forked import run_fresh

from study.recipes import read_recipe
from study.report import study_page
from study.statistics import Outcome, Study, t_interval

RECIPE = """
name: small
train: {max_steps: 20, total_train_batch_size: 32}
seeds: [0, 1, 2]
learning_rates: [1.0e-4, 1.0e-3]
evaluate: {tatoeba: "eval_retrieval.py --model {model} --output_file {result}"}
runs:
  tr: {objective: tr}
  dap: {objective: tr+rtl}
  tr-same-time: {like: tr, same_time_as: dap}
"""


def outcome(run: str, rate: float, seed: int, accuracy: float, dev: float = 90.0) -> Outcome:
    averages = {"36 languages": {"xx-en": accuracy, "en-xx": accuracy - 2}}
    results = {"tatoeba": {"settings": {}, "averages": averages}}
    dev_numbers = {"eval_mean_accuracy": dev}
    settings = {"command": "train_dap.py", "objective": "tr+rtl" if run == "dap" else "tr"}
    settings |= {"machine": "a CPU", "versions": {"torch": "9.9"}, "commit": "0123"}
    return Outcome(run, seed, rate, 20, 32, settings, dev_numbers, {}, results)


def shown(values: Sequence[float], sign: str = "") -> str:
    return f"{statistics.fmean(values):{sign}.2f} ± {statistics.stdev(values):.2f}"


def test_tables_have_means_deviations_and_paired_differences(tmp_path: Path) -> None:
    rng = random.Random(0)
    found = {}
    outcomes = []
    for run, level in {"tr": 85.0, "dap": 91.0}.items():
        outcomes.append(outcome(run, 1e-4, 0, 10.0, dev=80.0))  # a rate that is not chosen
        found[run] = [round(level + rng.random(), 4) for _ in range(3)]
        for seed, accuracy in enumerate(found[run]):
            outcomes.append(outcome(run, 1e-3, seed, accuracy))
    (tmp_path / "small.yaml").write_text(RECIPE)
    study = Study(read_recipe(tmp_path / "small.yaml"), tuple(outcomes), {})

    page = study_page([study], {}, tmp_path)
    *_, values, differences = re.findall(r"\| Tatoeba xx→en, 36 languages \| (.+) \|", page)
    assert values == f"{shown(found['tr'])} | {shown(found['dap'])}"
    paired = [a - b for a, b in zip(found["dap"], found["tr"])]
    within = ", ".join(f"{end:+.2f}" for end in t_interval(paired))
    by_seed = ", ".join(f"{each:+.2f}" for each in paired)
    assert differences == f"{shown(paired, '+')} | {by_seed} | {within}"


def test_an_interval_is_that_of_students_t_for_any_number_of_seeds() -> None:
    stats = pytest.importorskip("scipy.stats")
    for count in (2, 5, 6, 12, 31):
        found = [float(number % 4) for number in range(count)]
        mean, error = statistics.mean(found), stats.sem(found)
        expected = stats.t.interval(0.95, count - 1, mean, error)
        assert t_interval(found) == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_the_repositorys_own_tables_are_what_its_results_say() -> None:
    """In a fresh process, which shows that the report needs no torch."""
    code = "import sys; from study.report import main; main(['--check'])"
    code += "; sys.exit('torch' in sys.modules)"
    run_fresh(sys.executable, "-c", code, cwd=REPOSITORY)
