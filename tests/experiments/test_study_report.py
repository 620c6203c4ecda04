"""Collected results are checked, and tables show what plain arithmetic gives."""

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, squeezed

from experiments import collect, report, study_figures
from experiments.reading import read_studies
from experiments.statistics import HELD_OUT, Study, t_interval
from experiments.study_figures import is_drawn, pictures, save

RECIPE = """
name: small
train: {model_name_or_path: "{encoder}", max_steps: 20, total_train_batch_size: 32}
seeds: [0, 1, 2]
learning_rates: [1.0e-4, 1.0e-3]
evaluate: {tatoeba: "eval_retrieval.py --model {model} --output_file {result}"}
runs:
  start: {objective: tr, learning_rate: 0.0, seeds: [0]}
  tr: {objective: tr}
  dap: {objective: tr+rtl}
  tlm: {objective: tr+tlm}
  tr-same-time: {like: tr, same_time_as: dap}
"""
ABLATIONS = """
name: ablations
train: {objective: tr+rtl, learning_rate: 1.0e-3}
seeds: [0, 1]
evaluate: {tatoeba: "eval_retrieval.py --model {model}"}
runs:
  base: {}
  layers-1: {rtl_layers: 1}
  layers-3: {rtl_layers: 3}
"""
LINE = ["train_dap.py", "--objective", "tr", "--max_steps", "20"]
TATOEBA = "Tatoeba, 36 languages, mean of both directions"


class Project:
    """A folder laid out like the repository, with two recipes and results of runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs = root / "runs" / "results"
        self.recipes = root / "experiments" / "recipes"
        self.results = root / "experiments" / "results"
        self.figures = root / "docs" / "figures"
        for folder in (self.recipes, self.results, self.figures):
            folder.mkdir(parents=True)
        (self.recipes / "small.yaml").write_text(RECIPE)
        (self.recipes / "ablations.yaml").write_text(ABLATIONS)

    def add(
        self,
        run: str,
        rate: float,
        seed: int,
        accuracy: float | None,
        recipe: str = "small",
        dev: float = 90.0,
        evaluations: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write the result of a run: accuracy xx→en on Tatoeba, and others if given."""
        evaluations = dict(evaluations or {})
        if accuracy is not None:
            evaluations["tatoeba"] = {
                "settings": {"max_pairs": 250, "text": "abc"},
                "averages": {"36 languages": {"xx-en": accuracy, "en-xx": accuracy - 2}},
            }
        loss = "rtl_loss" if run == "dap" else "tr_loss"
        curve = []
        for step in (5, 10, 20):
            curve.append({"step": step, "loss": 1.0, loss: 5.0 / step + seed})
        content = {
            "recipe": recipe,
            "run": run,
            "seed": seed,
            "learning_rate": rate,
            "record": {"pairs a step": 32},
            "train": {"model_step": 20},
            "dev": {"eval_mean_accuracy": dev},
            "curve": curve,
            "evaluations": evaluations,
            "commit": "0123456789",
            "machine": {"cpu": "a CPU", "gpu": None, "threads": 1},
            "versions": {"torch": "9.9"},
        }
        path = self.runs / recipe / f"{run}-lr{rate:g}" / f"seed-{seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
        return path

    def collect(self, recipe: str = "small", *flags: str) -> None:
        path = str(self.recipes / f"{recipe}.yaml")
        options = ["--results_dir", str(self.runs), "--output_dir", str(self.results)]
        collect.main([path, *options, *flags])

    def report(self, *flags: str) -> None:
        report.main(["--root", str(self.root), *flags])

    def studies(self) -> list[Study]:
        return read_studies(self.recipes, self.results)

    def page(self) -> str:
        return report.study_page(self.studies(), {}, self.results)

    def rows(self, label: str) -> list[list[str]]:
        """Return the cells of all rows with this label."""
        found = []
        for line in self.page().splitlines():
            cells = [cell.strip() for cell in line.split("|")]
            if cells[1:2] == [label]:
                found.append(cells[2:-1])
        return found


def shown(values: Sequence[float], sign: str = "") -> str:
    return f"{statistics.fmean(values):{sign}.2f} ± {statistics.stdev(values):.2f}"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr(study_figures, "COMPARED", ("small",))
    monkeypatch.setattr(study_figures, "WITH_LOSSES", ("small",))
    return Project(tmp_path)


def test_tables_have_means_deviations_and_differences(project: Project) -> None:
    rng = random.Random(0)
    found = {}
    project.add("start", 0.0, 0, 80.0)
    for run, level in {"tr": 85.0, "tlm": 86.0, "dap": 91.0}.items():
        project.add(run, 1e-4, 0, None, dev=80.0)
        found[run] = [round(level + rng.random(), 4) for _ in range(3)]
        for seed, accuracy in enumerate(found[run]):
            xnli = {"xnli": {"mean": {"accuracy": accuracy / 2}}}
            is_measured = (run, seed) != ("dap", 2)
            project.add(run, 1e-3, seed, accuracy, evaluations=xnli if is_measured else {})
    project.add("tr-same-time", 1e-3, 0, 85.5)
    project.collect()

    values, differences, same_time = project.rows("Tatoeba xx→en, 36 languages")[-3:]
    assert values == ["80.00", *(shown(found[run]) for run in ("tr", "tlm", "dap"))]
    paired = [a - b for a, b in zip(found["dap"], found["tr"], strict=True)]
    mean, by_seed, within = differences[-3:]
    assert mean == shown(paired, "+")
    assert by_seed == ", ".join(f"{each:+.2f}" for each in paired)
    half = 4.303 * statistics.stdev(paired) / 3**0.5
    ends = (statistics.fmean(paired) - half, statistics.fmean(paired) + half)
    assert within == ", ".join(f"{end:+.2f}" for end in ends)
    assert same_time[0].endswith("(n=1)")

    assert ["`tr`", "3", "0.001", "20", "640"] in project.rows("TR")
    assert project.rows("XNLI, mean accuracy")[1][-1].endswith("(n=2)")

    drawn = pictures(project.studies())
    points = [(160, 2.0), (320, 1.5), (640, 1.25)]  # means of the seeds
    assert drawn["loss-small.svg"].data["rtl_loss"] == {"DAP": points}
    panel = drawn["comparison-small.svg"].data["Tatoeba xx→en"]
    assert panel["DAP"] == {"method": "DAP", "values": found["dap"]}


TOTAL = """
name: small
train: {max_steps: 20, total_train_batch_size: 32, learning_rate: 1.0e-3}
seeds: [0, 1]
evaluate: {news: "experiments.measure_sentences --model {model} --output_file {result}"}
runs:
  tr: {objective: tr}
  bow: {objective: tr+bow, total_time_as: tr}
  own: {like: bow, command: experiments.control_own_words}
  slow: {objective: tr, learning_rate: 1.0e-4}
"""


def test_total_costs_and_intervals_by_sentence(project: Project) -> None:
    (project.recipes / "small.yaml").write_text(TOTAL)
    misses = {
        "tr": [[2, 0, 1, 1], [2, 0, 0, 2]],
        "bow": [[1, 0, 0, 1], [1, 0, 0, 1]],
        "own": [[0, 0, 0, 1], [1, 0, 0, 1]],
        "slow": [[2, 1, 1, 1], [2, 0, 1, 1]],
    }
    for run, seeds in misses.items():
        for seed, counts in enumerate(seeds):
            error = {"error": 100 * sum(counts) / 8}
            news = {
                "averages": {"2 of 36 languages": {"pool_xx-en": 90.0 + seed, "pool_en-xx": 80.0}},
                "hard_negatives": {"mean": {"error": error}},
                "sentences": {"languages": 2, "error": counts},
            }
            rate = 1e-4 if run == "slow" else 1e-3
            path = project.add(run, rate, seed, None, evaluations={"news": news})
            content = json.loads(path.read_text())
            if run in ("bow", "own"):
                content["heads"] = {"pairs": 500, "steps": 40, "cpu_seconds": 8.0 + seed}
                path.write_text(json.dumps(content))
    timing = {"steps": {"tr": {"cpu": 2.0}, "bow": {"cpu": 2.5}}}
    (project.runs / "small" / "timing.json").write_text(json.dumps(timing))
    project.collect()
    assert project.rows("multilingual pool of news xx→en, 2 of 36 languages")[0][0] == (
        "90.50 ± 0.71"
    )
    values, differences, bootstrap, *controls = project.rows("hard negatives of news, error")
    assert values == ["50.00 ± 0.00", "25.00 ± 0.00"]
    assert differences[1] == "-25.00, -25.00"
    low, high = map(float, bootstrap[0].split(", "))
    assert -50 <= low < -25 < high <= 0
    assert ["40", "500", "8", "20", "640", "50", "58"] in project.rows("TR+BOW")

    # A control is compared with the method that it copies, a variant with TR.
    _, from_bow, from_tr = controls
    assert from_bow[1] == "-12.50, +0.00"
    assert from_tr[1] == "+12.50, +0.00"


def test_ablations_are_beside_their_base(project: Project) -> None:
    for seed, accuracy in enumerate([80.0, 82.0]):
        project.add("base", 1e-3, seed, accuracy, "ablations")
        project.add("layers-1", 1e-3, seed, accuracy + 1 + seed, "ablations")
    project.collect("ablations")
    page = squeezed(project.page())
    assert "| base | | 2 | 90.00 ± 0.00 | – | 80.00 ± 1.41 | – |" in page
    assert "| layers | 1 | 2 | 90.00 ± 0.00 | +0.00 ± 0.00 | 81.50 ± 2.12 | +1.50 ± 0.71 |" in page
    assert "| | 3 | not run | – | – | – | – |" in page
    assert f"deviation of 0.00 ({HELD_OUT.label}), 0.71 ({TATOEBA})" in " ".join(page.split())

    picture = pictures(project.studies())["ablations.svg"]
    assert picture.data[TATOEBA] == {"layers-1": [1.0, 2.0]}
    path = project.figures / "ablations.svg"
    save(picture, path)
    assert is_drawn(picture, path)
    assert "layers-1" in path.read_text()


def test_an_interval_is_that_of_students_t_for_any_number_of_seeds() -> None:
    t = pytest.importorskip("scipy.stats").t
    for count in (2, 5, 6, 12, 31):
        found = [float(number % 4) for number in range(count)]
        width = t.ppf(0.975, count - 1) * statistics.stdev(found) / count**0.5
        expected = statistics.mean(found) - width, statistics.mean(found) + width
        assert t_interval(found) == pytest.approx(expected, abs=1e-3)
    assert t_interval([0.0, 1.0] * 50) is not None


def test_what_was_not_run_is_listed(project: Project) -> None:
    project.add("tr", 1e-4, 0, None, dev=95.0)
    project.collect()
    lines = project.page().splitlines()
    assert "- `ablations`: nothing was run" in lines
    assert "- `small`, `tr`: training, seed 0, 1, 2" in lines
    project.add("tr", 1e-3, 0, None, dev=94.0)
    project.collect()
    lines = project.page().splitlines()
    assert "- `small`, `tr`: training, seed 1, 2; tatoeba, seed 0" in lines


def test_page_and_figures_are_written_once_and_checked(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in ("tr", "dap"):
        project.add(run, 1e-4, 0, None, dev=80.0)
        project.add(run, 1e-3, 0, 81.25)
    project.collect()
    project.report()
    page = project.root / report.PAGE
    files = [page, *sorted(project.figures.iterdir())]
    before = [path.read_bytes() for path in files]
    project.report("--check")
    assert "as the results say" in capsys.readouterr().out
    project.report()
    assert [path.read_bytes() for path in files] == before

    page.write_text(page.read_text().replace("81.25", "81.26"))
    (project.figures / "loss-small.svg").write_bytes(b"<svg/>")
    with pytest.raises(SystemExit, match=r"(?s)STUDY.md\n.*loss-small.svg\nrun `python -m"):
        project.report("--check")
    assert page.read_text().count("81.26") > 0  # nothing was written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"record": {"max_steps": 10}}, "trained with max_steps 10, but tr has 20"),
        ({"record": {"pairs a step": 64}}, "trained with pairs a step 64, but tr has 32"),
        ({"command": ["own.py"]}, "trained with command own.py, but tr has train_dap.py"),
        ({"command": [*LINE[:-1], "200"]}, "trained without --max_steps 20"),
        ({"encoder": "b2"}, r"differ in encoder \('a1' and 'b2'"),
        ({"record": {"pooling": "mean"}}, r"differ in pooling \('cls' and 'mean'"),
        ({"record": {"text": {"de": 1, "fi": 3}}}, r"differ in fi of text \(2 and 3\)"),
        ({"evaluations": {"tatoeba": {"settings": {}}}}, "differ in max_pairs of tatoeba"),
        ({"seed": 5}, "is the result small/tr-lr0.001/seed-5.json"),
        ({"run": "old"}, "is the result small/old"),
    ],
)
def test_results_that_do_not_fit_are_refused(
    project: Project, change: dict[str, Any], message: str
) -> None:
    paths = [project.add("tr", 1e-3, seed, 80.0) for seed in (0, 1)]
    for path in paths:
        content = json.loads(path.read_text())
        content["command"] = LINE
        content["encoder"] = "a1"
        content["record"] |= {"pooling": "cls", "text": {"de": 1, "fi": 2}}
        path.write_text(json.dumps(content))
    project.collect()

    for key, value in change.items():
        content[key] = content[key] | value if isinstance(value, dict) else value
    paths[1].write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=message):
        project.collect()


def test_results_whose_files_are_gone_are_kept_if_they_fit(project: Project) -> None:
    paths = [project.add(run, 1e-3, seed, 80.0) for run in ("tr", "dap") for seed in (0, 1)]
    for path in paths:
        content = json.loads(path.read_text())
        content["record"] |= {"max_steps": 20, "training text": {"de": content["seed"]}}
        path.write_text(json.dumps(content))
    (project.runs / "small" / "timing.json").write_text('{"steps": {"tr": {"cpu": 2.0}}}')
    project.collect()
    merged = project.results / "small.json"
    before = merged.read_bytes()

    gone = paths[:3]  # the file of DAP with seed 1 stays
    for path in gone:
        path.unlink()
    (project.runs / "small" / "timing.json").unlink()
    project.collect("small", "--keep")
    assert merged.read_bytes() == before

    content["record"]["training text"] = {"de": 7}
    paths[3].write_text(json.dumps(content))
    with pytest.raises(SystemExit, match="differ in training text"):
        project.collect("small", "--keep")
    content["record"]["training text"] = {"de": 1}
    content["evaluations"]["tatoeba"]["settings"]["text"] = "abd"
    paths[3].write_text(json.dumps(content))
    with pytest.raises(SystemExit, match="differ in text of tatoeba"):
        project.collect("small", "--keep")
    content["evaluations"]["tatoeba"]["settings"]["text"] = "abc"
    paths[3].write_text(json.dumps(content))

    recipe = project.recipes / "small.yaml"
    recipe.write_text(RECIPE.replace("tr: {objective: tr}", "tr: {objective: tr, max_steps: 30}"))
    with pytest.raises(SystemExit, match=r"tr has 30"):
        project.collect("small", "--keep")
    recipe.write_text(RECIPE.replace("seeds: [0, 1, 2]", "seeds: [1, 2]"))
    with pytest.raises(SystemExit, match=r"small.json: .* no run dap with seed 0"):
        project.collect("small", "--keep")
    assert merged.read_bytes() == before

    recipe.write_text(RECIPE)
    project.collect()  # without the flag only what is there
    (outcome,) = project.studies()[0].outcomes
    assert (outcome.run, outcome.seed) == ("dap", 1)


def test_files_that_are_no_results_are_refused(project: Project) -> None:
    path = project.add("tr", 1e-3, 0, 80.0)
    path.write_text("{}")
    with pytest.raises(SystemExit, match="has no recipe, run"):
        project.collect()
    (project.results / "small.json").write_text("{}")
    with pytest.raises(ValueError, match="small.json: not written by"):
        project.studies()
    (project.results / "small.json").rename(project.results / "other.json")
    with pytest.raises(ValueError, match=r"other.json: no recipe"):
        project.studies()


def test_the_repositorys_own_tables_are_what_its_results_say() -> None:
    """In a fresh process, which shows that the report needs no torch."""
    code = "import sys; from experiments.report import main; main(['--check'])"
    code += "; sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
