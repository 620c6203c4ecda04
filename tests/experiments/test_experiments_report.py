"""Reports of experiments: their numbers against the standard library, and documents that cannot drift from results."""

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

from dap.reports import PAPER_TATOEBA
from experiments import report
from experiments.cost import cost_block
from experiments.markdown import filled
from experiments.plots import digest_of, pictures, save
from experiments.reading import read_studies
from experiments.report import blocks, main, paper_block, readme_block
from experiments.statistics import HELD_OUT, START, Spread, Study, clear_best, measures, pooled_sd, spread

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
evaluate: {tatoeba: "eval_retrieval.py --model {model}"}
runs: {base: {}, layers-1: {rtl_layers: 1}, layers-3: {rtl_layers: 3}, bidirectional: {tr_bidirectional: true}}
"""
RATES = """
name: rates
learning_rates: [1.0e-4, 1.0e-3]
runs: {tr: {objective: tr}}
"""
BLOCKS = ("comparison-small", "paper", "learning-rates", "ablations", "alignment", "cost", "missing", "machine")


def marks(names: Sequence[str]) -> str:
    places = [f"By hand.\n<!-- begin {name} -->\n<!-- end {name} -->" for name in names]
    return "\n\n".join(places) + "\nThe end, *  as it is."


def change(path: Path, changes: Mapping[str, Any]) -> None:
    """Changes a JSON file at places such as "record.max_steps"."""
    content = json.loads(path.read_text())
    for place, value in changes.items():
        *parents, last = place.split(".")
        reduce(getitem, parents, content)[last] = value
    path.write_text(json.dumps(content))


class Project:
    """A folder with recipes, results and the two documents."""

    def __init__(self, folder: Path) -> None:
        self.recipes, self.results, self.figures = folder / "recipes", folder / "results", folder / "docs" / "figures"
        self.docs, self.readme = folder / "docs" / "reproduction.md", folder / "README.md"
        self.recipes.mkdir()
        self.docs.parent.mkdir()
        (self.recipes / "small.yaml").write_text(RECIPE)
        (self.recipes / "ablations.yaml").write_text(ABLATIONS)
        (self.recipes / "rates.yaml").write_text(RATES)
        self.docs.write_text(marks(BLOCKS))
        self.readme.write_text(marks(["results-comparison"]))

    def add(
        self, run: str, rate: float, seed: int, accuracy: float | None, recipe: str = "small", **more: float
    ) -> Path:
        """Writes a result file; `more` has the numbers of xnli, bucc (F1), aer, and dev (held-out pairs)."""
        evaluations = {}
        if accuracy is not None:
            averages = {"36 languages": {"xx-en": accuracy, "en-xx": accuracy - 2}}
            settings = {"max_pairs": 250, "text": "abc"}
            languages = {code: {"xx-en": accuracy + own, "en-xx": accuracy} for code, own in (("de", 1), ("fi", -1))}
            evaluations["tatoeba"] = {"protocol": "p", "settings": settings, "averages": averages}
            evaluations["tatoeba"]["languages"] = languages
        if "xnli" in more:
            evaluations["xnli"] = {"mean": {"languages": 15, "accuracy": more["xnli"]}}
        if "bucc" in more:
            evaluations["bucc"] = {"pairs": {"zh-en": {"precision": 90.0, "recall": 80.0, "f1": more["bucc"]}}}
        if "aer" in more:
            evaluations["alignment"] = {"languages": {"de": {"AER": more["aer"]}}, "mean": {"AER": more["aer"]}}
        losses = {"tr": ("tr_loss",), "dap": ("tr_loss", "rtl_loss"), "tlm": ("tr_loss", "tlm_loss")}.get(run, ())
        curve = [{"step": s, "loss": 1.0} | dict.fromkeys(losses, 5.0 / s + seed) for s in (5, 10, 20)]
        content = {
            "recipe": recipe, "run": run, "seed": seed, "learning_rate": rate, "record": {"pairs a step": 32},
            "train": {"model_step": 20}, "dev": {"eval_mean_accuracy": more.get("dev", 90.0)}, "curve": curve,
            "evaluations": evaluations, "commit": "0123456789", "machine": {"cpu": "a CPU", "gpu": None, "threads": 1},
            "versions": {"torch": "9.9"},
        }  # fmt: skip
        path = self.results / recipe / f"{run}-lr{rate:g}" / f"seed-{seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
        return path

    def add_comparison(self) -> dict[str, list[float]]:
        """A study with everything in it; returns run -> accuracies xx→en by seed."""
        rng = random.Random(0)
        found = {"start": [80.0]}
        self.add("start", 0.0, 0, 80.0, xnli=40.0, bucc=70.0, aer=60.0)
        for run, level in {"tr": 85.0, "tlm": 86.0, "dap": 91.0}.items():
            self.add(run, 1e-4, 0, None, dev=80.0)
            found[run] = [round(level + rng.random(), 4) for _ in range(3)]
            for seed, accuracy in enumerate(found[run]):
                more = {name: accuracy / 2 + rng.random() for name in ("xnli", "bucc", "aer")}
                self.add(run, 1e-3, seed, accuracy, **more)
        self.add("tr-same-time", 1e-3, 0, 85.5)
        return found

    def report(self, *flags: str) -> None:
        places = {"results_dir": self.results, "recipes_dir": self.recipes, "docs": self.docs, "readme": self.readme}
        main([*(f"--{name}={path}" for name, path in (places | {"figures": self.figures}).items()), *flags])

    def studies(self) -> list[Study]:
        return read_studies(self.recipes, self.results)

    def tables(self) -> str:
        """Everything that the document would have, without its plots, which take their time."""
        return "\n".join(blocks(self.studies(), {}).values())

    def row(self, label: str) -> list[str]:
        """The cells of the first row with this label."""
        line = next(line for line in self.tables().splitlines() if line.startswith(f"| {label} |"))
        return [cell.strip() for cell in line.split("|")[2:-1]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr(report, "README_ROWS", {"small": (START, "TR", "DAP"), "absent": ("TR",)})
    return Project(tmp_path)


def test_spreads_are_those_of_the_standard_library() -> None:
    values = [90.1, 88.25, 91.0, 90.5]
    found = spread([*values, None])
    assert found == Spread(statistics.fmean(values), statistics.stdev(values), 4)
    assert spread([90.1]) == Spread(90.1, None, 1)
    assert spread([None]) is None
    other = [80.0, 84.0]
    residuals = [value - statistics.fmean(group) for group in (values, other) for value in group]
    assert pooled_sd([found, spread(other)]) ** 2 == pytest.approx(sum(r * r for r in residuals) / (6 - 2))


def test_the_best_is_named_only_if_it_is_clearly_ahead() -> None:
    wide, ahead, single = Spread(90.0, 2.0, 3), Spread(95.0, 2.0, 3), Spread(99.0, None, 1)
    assert clear_best({"a": wide, "b": ahead, "c": None}) == "b"
    assert clear_best({"a": wide, "b": ahead}, lower_is_better=True) == "a"
    assert clear_best({"a": wide, "b": Spread(93.9, 2.0, 3)}) is None
    assert clear_best({"a": wide, "b": single}) is None
    assert clear_best({"a": wide, "b": Spread(95.0, 2.0, 2)}) is None  # two seeds are close by chance
    assert clear_best({"a": wide, "b": Spread(95.0, 0.0, 3)}) is None  # at a ceiling
    assert clear_best({"a": wide}) is None


def test_comparison_has_means_deviations_and_differences(project: Project) -> None:
    found = project.add_comparison()
    start, tr, tlm, dap, difference, by_seed, within = project.row("Tatoeba xx→en, 36 languages")
    assert start == "80.00"  # one seed has no deviation
    assert tr == f"{statistics.fmean(found['tr']):.2f} ± {statistics.stdev(found['tr']):.2f}"
    assert tlm == f"{statistics.fmean(found['tlm']):.2f} ± {statistics.stdev(found['tlm']):.2f}"
    assert dap == f"**{statistics.fmean(found['dap']):.2f} ± {statistics.stdev(found['dap']):.2f}**"
    paired = [a - b for a, b in zip(found["dap"], found["tr"], strict=True)]
    assert difference == f"{statistics.fmean(paired):+.2f} ± {statistics.stdev(paired):.2f}"
    assert by_seed == ", ".join(f"{each:+.2f}" for each in paired)
    low, high = map(float, within.split(", "))
    assert round(min(paired), 2) <= low < statistics.fmean(paired) < high <= round(max(paired), 2)
    assert project.row("XNLI, mean accuracy")[-1] == "–"  # nothing by language
    assert project.row("seeds")[:4] == ["1", "3", "3", "3"]
    assert project.row("pairs seen")[:4] == ["0", "640", "640", "640"]
    assert "the first 250 pairs of each language" in project.tables().replace("\n", " ")
    same_time = blocks(project.studies(), {})["comparison-small"].partition("The same time")[2].splitlines()
    assert not any(line.startswith("| XNLI") for line in same_time)  # only DAP has it
    assert any(line.startswith("| Tatoeba xx→en, 36 languages | 85.50 |") for line in same_time)


def test_the_papers_numbers_stand_in_a_table_of_their_own(project: Project) -> None:
    assert paper_block(project.studies()) == "Not run yet."
    project.add_comparison()
    lines = paper_block(project.studies()).splitlines()
    models = [cell.strip() for cell in lines[0].split("|")[2:-1]]
    assert models == [f"{name}{trained}" for name in ("mBERT", "XLM-R") for trained in ("", "+TR", "+TR+TLM", "+DAP")]
    row = next(line for line in lines if line.startswith("| Tatoeba xx→en, 36 languages |"))
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [str(PAPER_TATOEBA[name]["xx-en"][2]) for name in models]
    assert not any(line.startswith("| AER |") for line in lines)


def test_readme_shows_the_chosen_rows_of_studies_that_were_run(project: Project) -> None:
    assert readme_block(project.studies(), "docs/reproduction.md").startswith("Not run yet.")
    found = project.add_comparison()
    text = readme_block(project.studies(), "docs/reproduction.md")
    assert f"| small: DAP | {statistics.fmean(found['dap']):.2f} ± {statistics.stdev(found['dap']):.2f} |" in text
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| small")]
    assert rows == ["| small: encoder as it is", "| small: TR", "| small: DAP"]


def test_fewer_seeds_than_the_run_are_marked(project: Project) -> None:
    project.add_comparison()
    project.add("dap", 1e-3, 2, 91.0)  # without xnli
    *_, dap, _, by_seed, _ = project.row("XNLI, mean accuracy")
    assert dap.strip("*").endswith("(n=2)")
    assert by_seed.count(",") == 1


def test_searches_show_every_rate_and_mark_the_chosen_one(project: Project) -> None:
    found = {("tr", 1e-4, "small"): 95.0, ("tr", 1e-3, "small"): 94.0, ("dap", 1e-4, "small"): 93.0}
    found |= {("tr", 1e-4, "rates"): 91.0, ("tr", 1e-3, "rates"): 92.0}
    for (run, rate, study), dev in found.items():
        project.add(run, rate, 0, None, study, dev=dev)
    lines = project.tables().splitlines()
    assert "| TR | 91.00 | **92.00** |" in lines
    assert "| TR | **95.00** | 94.00 |" in lines
    assert "| DAP | 93.00 | – |" in lines


def test_ablations_are_beside_their_base(project: Project) -> None:
    for seed, accuracy in enumerate([80.0, 82.0]):
        project.add("base", 1e-3, seed, accuracy, "ablations")
        project.add("layers-1", 1e-3, seed, accuracy + 1 + seed, "ablations")
    (project.recipes / "ablations.yaml").write_text(ABLATIONS + "seeds: [0, 1]\n")
    lines = project.tables().splitlines()
    assert any(line.startswith("| base |  | 2 | 90.00 ± 0.00 | – | 80.00 ± 1.41 | – |") for line in lines)
    assert any(line.endswith("| 81.50 ± 2.12 | +1.50 ± 0.71 |") and "| layers | 1 | 2 |" in line for line in lines)
    assert any(line.startswith("|  | 3 | not run | – | – | – | – |") for line in lines)
    note = " ".join(project.tables().split())
    assert "one seed's difference from `base` has a standard deviation of 0.00 (held-out training pairs; 1 deg" in note
    assert "0.71 (Tatoeba, 36 languages, mean of both directions; 1 degree of freedom)" in note


def test_what_was_not_run_is_listed(project: Project) -> None:
    project.add("tr", 1e-4, 0, None, dev=95.0)
    lines = project.tables().splitlines()
    assert "- `ablations`: nothing of it was run" in lines
    assert "- `small`, `tr`: search at 0.001; training of seeds 1, 2" in lines
    project.add("tr", 1e-3, 0, None, dev=94.0)
    lines = project.tables().splitlines()
    assert "- `small`, `tlm`: search at 0.0001, 0.001; training of seeds 1, 2" in lines
    assert "- `small`, `tr-same-time`: training of seeds 0, 1, 2" in lines
    assert "- `small`, `tr`: training of seeds 1, 2; tatoeba of seed 0" in lines


def test_documents_are_made_once_and_checked(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("tr", "dap"):
        project.add(run, 1e-4, 0, None, dev=80.0)
        project.add(run, 1e-3, 0, 81.25)
    project.report()
    files = [project.docs, project.readme, *sorted(project.figures.iterdir())]
    before = [path.read_bytes() for path in files]
    assert project.docs.read_text().count("By hand.") == len(BLOCKS)
    assert project.docs.read_text().endswith("The end, *  as it is.")
    project.report("--check")
    again = project.figures.parent / "loss-small.svg"
    save(pictures(project.studies())[again.name], again)
    assert again.read_bytes() == (project.figures / again.name).read_bytes()
    assert "as the results say" in capsys.readouterr().out
    assert [path.read_bytes() for path in files] == before
    assert all(len(content) < 100_000 for content in before)

    project.readme.write_text(project.readme.read_text().replace("81.25", "81.26"))
    (project.figures / "loss-small.svg").write_bytes(b"<svg/>")
    changed = [path.read_bytes() for path in files]
    message = r"(?s)README.md: results-comparison\n.*loss-small.svg: the picture\nrun `python -m experiments.report`"
    with pytest.raises(SystemExit, match=message):
        project.report("--check")
    assert [path.read_bytes() for path in files] == changed

    project.readme.write_bytes(before[1])
    project.add("tr", 1e-3, 0, 81.26)
    with pytest.raises(SystemExit, match=r"(?s)reproduction.md: comparison-small.*comparison-small.svg: the picture"):
        project.report("--check")


def test_plots_show_the_numbers_of_the_results(project: Project) -> None:
    found = project.add_comparison()
    drawn = pictures(project.studies())
    assert set(drawn) == {"learning-rates.svg", "loss-small.svg", "comparison-small.svg"}
    losses = drawn["loss-small.svg"].data
    assert losses["RTL loss"] == {"DAP": [(160, 2.0), (320, 1.5), (640, 1.25)]}  # 5 / step + mean of seeds 0, 1, 2
    assert set(losses["TR loss"]) == {"TR", "TR+TLM", "DAP"}
    assert drawn["learning-rates.svg"].data["small"]["TR"] == [(1e-4, 80.0), (1e-3, 90.0)]
    shown, labels = drawn["comparison-small.svg"].data["Tatoeba xx→en, 36 languages"], (START, "TR", "TR+TLM", "DAP")
    assert shown["same pairs"] == {label: found[run] for label, run in zip(labels, ("start", "tr", "tlm", "dap"))}
    assert shown["same time"] == {"TR": [85.5]}


def test_ablations_are_drawn(project: Project) -> None:
    for run, accuracy in (("base", 80.0), ("layers-1", 81.0), ("bidirectional", 79.0)):
        project.add(run, 1e-3, 0, accuracy, "ablations")
    picture = pictures(project.studies())["ablations.svg"]
    same = {"layers-1": [0.0], "bidirectional": [0.0]}
    tatoeba = "Tatoeba, 36 languages, mean of both directions"
    assert picture.data == {HELD_OUT.label: same, tatoeba: {"layers-1": [1.0], "bidirectional": [-1.0]}}
    path = project.figures / "ablations.svg"
    save(picture, path)
    assert digest_of(path) == picture.digest
    assert all(name in path.read_text() for name in same)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.md has no <!-- begin a --> and <!-- end a -->: put them in"),
        ("<!-- begin a -->", "<!-- begin a --> has no <!-- end a -->"),
        ("<!-- end a -->", "<!-- end a --> follows no such begin"),
        ("<!-- begin a --><!-- begin b -->", "<!-- begin b --> follows <!-- begin a -->"),
        ("<!-- begin a --><!-- end b -->", "<!-- end b --> follows <!-- begin a -->"),
        ("<!-- begin c -->", "no block is called c; there are a, b"),
        ("<!-- begin a --><!-- end a --><!-- begin a --><!-- end a -->", "<!-- begin a --> is there twice"),
    ],
)
def test_marks_that_do_not_fit_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filled(text, {"a": "A", "b": "B"}, Path("f.md"))


def test_an_argument_that_no_record_has_is_looked_for_in_the_command(project: Project) -> None:
    path, line = project.add("tr", 1e-3, 0, 80.0), ["train_dap.py", "--objective", "tr", "--max_steps", "20"]
    (project.recipes / "small.yaml").write_text(RECIPE.replace("max_steps: 20", "max_steps: 20, odd: 3"))
    change(path, {"command": line})
    with pytest.raises(SystemExit, match="seed-0.json: trained without --odd 3: train it anew"):
        project.report()
    change(path, {"command": [*line, "--odd", "3"]})
    project.report()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"record.max_steps": 10}, "{1}: trained with max_steps 10, but tr has 20: train it anew"),
        ({"record.pairs a step": 64}, "{1}: trained with pairs a step 64, but tr has 32: train it anew"),
        ({"command": ["experiments.release"]}, "trained with command experiments.release, but tr has train_dap.py"),
        ({"encoder": "b2"}, r"{0} and {1} differ in encoder \('a1' and 'b2'"),
        ({"record.pooling": "mean"}, r"{0} and {1} differ in pooling \('cls' and 'mean'"),
        (
            {"evaluations.tatoeba.settings.max_pairs": None},
            r"tatoeba of {0} and {1} cannot be compared \(max_pairs 250 and None",
        ),
        ({"seed": 0}, "{1} and {0} are both of"),
        ({"run": "old"}, "has small/old: move it away"),
    ],
)
def test_results_that_do_not_fit_are_named(project: Project, changes: dict[str, Any], message: str) -> None:
    paths = [project.add("tr", 1e-3, seed, 80.0) for seed in (0, 1)]
    for path in paths:
        change(path, {"encoder": "a1", "record.pooling": "cls"})
    project.report()
    change(paths[1], changes)
    with pytest.raises(SystemExit, match=message.format(*paths)):
        project.report()


def test_what_is_no_result_is_named(project: Project) -> None:
    project.add("tr", 1e-3, 0, 80.0).write_text("{}")
    with pytest.raises(SystemExit, match="has no recipe, run"):
        project.report()


def test_cost_stands_beside_table_6(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    assert cost_block(path) == "Not run yet."
    part = {"TR": {"flops": 2e9, "cpu": 0.5}, "TLM": {"flops": 6e9, "cpu": 1.25}, "DAP": {"flops": 3e9, "cpu": 0.75}}
    arguments = {"tokens": 32, "size": "base", "batch_size": 5, "repeats": 3}
    path.write_text(json.dumps({"pair": part, "arguments": arguments, "machine": {"cpu": "a CPU", "threads": 1}}))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in cost_block(path).splitlines() if "|" in line]
    assert rows[3] == ["TR+TLM", "6.00", "3.00", "33.7", "3.06", "250", "2.50", "1.34", "2.63"]
    path.write_text("{}")
    with pytest.raises(ValueError, match="cost.json: not written by"):
        cost_block(path)


def test_measures_are_those_that_some_model_has(project: Project) -> None:
    path = project.add("tr", 1e-3, 0, 80.0, bucc=85.0)
    change(path, {"evaluations.news": {"hard_negatives": {"mean": {"error": {"error": 20.0, "name": 5.0}}}}})
    study = next(study for study in project.studies() if study.name == "small")
    labels = [measure.label for measure in measures(study)]
    tatoeba = ["Tatoeba xx→en, 36 languages", "Tatoeba en→xx, 36 languages"]
    hard = ["hard negatives of news, error", "hard negatives of news, error by name"]
    assert labels[:6] == [HELD_OUT.label, *tatoeba, *hard, "BUCC zh-en sample, F1"]
    assert not any("XNLI" in label for label in labels)


def test_the_repositorys_own_documents_are_what_its_results_say() -> None:
    """In a fresh process, which shows that tables need no torch."""
    code = "import sys; from experiments.report import main; main(['--check']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
