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

from experiments import report
from experiments.cost import cost_block
from experiments.markdown import filled
from experiments.plots import is_drawn, pictures, save
from experiments.reading import read_studies
from experiments.report import DOCS, documents, main
from experiments.statistics import HELD_OUT, START, Spread, Study, clear_best

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
LINE = ["train_dap.py", "--objective", "tr", "--max_steps", "20"]
BLOCKS = (
    "comparison-small",
    "paper",
    "learning-rates",
    "ablations",
    "alignment",
    "cost",
    "missing",
    "machine",
)


def marks(names: Sequence[str]) -> str:
    return (
        "\n\n".join(f"By hand.\n<!-- begin {name} -->\n<!-- end {name} -->" for name in names)
        + "\nThe end."
    )


def change(path: Path, changes: Mapping[str, Any]) -> None:
    """Changes a JSON file at places such as "record.max_steps"."""
    content = json.loads(path.read_text())
    for place, value in changes.items():
        *parents, last = place.split(".")
        reduce(getitem, parents, content)[last] = value
    path.write_text(json.dumps(content))


class Project:
    """A folder laid out as the checkout, with recipes and the two documents, for result files."""

    def __init__(self, root: Path) -> None:
        self.root, self.results, self.figures = (
            root,
            root / "experiments" / "results",
            root / "docs" / "figures",
        )
        self.recipes, self.docs, self.readme = (
            root / "experiments" / "recipes",
            root / DOCS,
            root / "README.md",
        )
        self.recipes.mkdir(parents=True)
        self.docs.parent.mkdir()
        for name, text in {"small": RECIPE, "ablations": ABLATIONS}.items():
            (self.recipes / f"{name}.yaml").write_text(text)
        self.docs.write_text(marks(BLOCKS))
        self.readme.write_text(marks(["results-comparison"]))

    def add(
        self,
        run: str,
        rate: float,
        seed: int,
        accuracy: float | None,
        recipe: str = "small",
        **own: Any,
    ) -> Path:
        """Writes a result file: accuracy xx→en on Tatoeba, `dev` on held-out pairs, other `evaluations`."""
        evaluations = dict(own.get("evaluations", {}))
        if accuracy is not None:
            languages = {
                code: {"xx-en": accuracy + more, "en-xx": accuracy}
                for code, more in (("de", 1), ("fi", -1))
            }
            averages = {"36 languages": {"xx-en": accuracy, "en-xx": accuracy - 2}}
            settings = {"max_pairs": 250, "text": "abc"}
            evaluations["tatoeba"] = {
                "settings": settings,
                "averages": averages,
                "languages": languages,
            }
        losses = {"rtl_loss"} if run == "dap" else {"tr_loss"}
        content = {
            "recipe": recipe, "run": run, "seed": seed, "learning_rate": rate, "record": {"pairs a step": 32},
            "train": {"model_step": 20}, "dev": {"eval_mean_accuracy": own.get("dev", 90.0)},
            "curve": [{"step": step, "loss": 1.0} | dict.fromkeys(losses, 5.0 / step + seed) for step in (5, 10, 20)],
            "evaluations": evaluations, "commit": "0123456789", "machine": {"cpu": "a CPU", "gpu": None, "threads": 1},
            "versions": {"torch": "9.9"},
        }  # fmt: skip
        path = self.results / recipe / f"{run}-lr{rate:g}" / f"seed-{seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
        return path

    def report(self, *flags: str) -> None:
        main(["--root", str(self.root), *flags])

    def studies(self) -> list[Study]:
        return read_studies(self.recipes, self.results)

    def block(self, name: str) -> str:
        """One of the document's, without plots, which take their time."""
        return documents(self.studies(), {}, self.results)[DOCS][name]

    def row(self, label: str) -> list[str]:
        """The cells of the first row with this label."""
        lines = self.block("comparison-small").splitlines()
        line = next(line for line in lines if line.startswith(f"| {label} |"))
        return [cell.strip() for cell in line.split("|")[2:-1]]


def shown(values: Sequence[float], sign: str = "") -> str:
    return f"{statistics.fmean(values):{sign}.2f} ± {statistics.stdev(values):.2f}"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr(report, "README_ROWS", {"small": (START, "TR", "DAP"), "absent": ("TR",)})
    return Project(tmp_path)


def test_the_best_is_named_only_if_it_is_clearly_ahead() -> None:
    spreads = {"a": Spread(90.0, 2.0, 3), "b": Spread(95.0, 2.0, 3), "c": None}
    assert (clear_best(spreads), clear_best(spreads, lower_is_better=True)) == ("b", "a")
    close, single, chance, ceiling = (
        (93.9, 2.0, 3),
        (99.0, None, 1),
        (95.0, 2.0, 2),
        (95.0, 0.0, 3),
    )
    for other in (close, single, chance, ceiling):
        assert clear_best(spreads | {"b": Spread(*other)}) is None
    assert clear_best({"a": Spread(90.0, 2.0, 3)}) is None


def test_comparison_has_means_deviations_and_differences(project: Project) -> None:
    rng, found = random.Random(0), {}
    project.add("start", 0.0, 0, 80.0)
    for run, level in {"tr": 85.0, "tlm": 86.0, "dap": 91.0}.items():
        project.add(run, 1e-4, 0, None, dev=80.0)
        found[run] = [round(level + rng.random(), 4) for _ in range(3)]
        for seed, accuracy in enumerate(found[run]):
            more = (
                {"xnli": {"mean": {"accuracy": accuracy / 2}}} if (run, seed) != ("dap", 2) else {}
            )
            project.add(run, 1e-3, seed, accuracy, evaluations=more)
    project.add("tr-same-time", 1e-3, 0, 85.5)
    start, tr, tlm, dap, *_, difference, by_seed, within = project.row(
        "Tatoeba xx→en, 36 languages"
    )
    assert start == "80.00"  # one seed has no deviation
    assert (tr, tlm, dap) == (shown(found["tr"]), shown(found["tlm"]), f"**{shown(found['dap'])}**")
    paired = [a - b for a, b in zip(found["dap"], found["tr"], strict=True)]
    assert (difference, by_seed) == (
        shown(paired, "+"),
        ", ".join(f"{each:+.2f}" for each in paired),
    )
    low, high = map(float, within.split(", "))
    assert round(min(paired), 2) <= low < statistics.fmean(paired) < high <= round(max(paired), 2)
    _, _, _, dap, *_, difference, by_seed, within = project.row("XNLI, mean accuracy")
    assert (dap[-5:], difference[-5:], by_seed.count(","), within) == (
        "(n=2)",
        "(n=2)",
        1,
        "–",
    )  # not by language
    assert project.row("seeds")[:4] == ["1", "3", "3", "3"]
    assert project.row("pairs seen")[:4] == ["0", "640", "640", "640"]
    same_pairs, _, same_time = project.block("comparison-small").partition("The same time")
    assert "the first 250 pairs of each language" in same_pairs
    assert "| XNLI" not in same_time  # only DAP has it
    assert "| Tatoeba xx→en, 36 languages | 85.50 |" in same_time

    drawn = pictures(project.studies())
    assert drawn["loss-small.svg"].data["RTL loss"] == {
        "DAP": [(160, 2.0), (320, 1.5), (640, 1.25)]
    }  # seeds' mean
    assert drawn["learning-rates.svg"].data["small"]["TR"] == [(1e-4, 80.0), (1e-3, 90.0)]


def test_ablations_are_beside_their_base(project: Project) -> None:
    for seed, accuracy in enumerate([80.0, 82.0]):
        project.add("base", 1e-3, seed, accuracy, "ablations")
        project.add("layers-1", 1e-3, seed, accuracy + 1 + seed, "ablations")
    (project.recipes / "ablations.yaml").write_text(ABLATIONS + "seeds: [0, 1]\n")
    block, tatoeba = project.block("ablations"), "Tatoeba, 36 languages, mean of both directions"
    assert "| base |  | 2 | 90.00 ± 0.00 | – | 80.00 ± 1.41 | – |" in block
    assert "| layers | 1 | 2 | 90.00 ± 0.00 | +0.00 ± 0.00 | 81.50 ± 2.12 | +1.50 ± 0.71 |" in block
    assert "|  | 3 | not run | – | – | – | – |" in block
    note = f"deviation of 0.00 ({HELD_OUT.label}; 1 degree of freedom), 0.71 ({tatoeba}; 1 degree of freedom)"
    assert note in " ".join(block.split())

    picture = pictures(project.studies())["ablations.svg"]
    assert picture.data == {
        HELD_OUT.label: {"layers-1": [0.0, 0.0]},
        tatoeba: {"layers-1": [1.0, 2.0]},
    }
    path = project.figures / "ablations.svg"
    save(picture, path)
    assert is_drawn(picture, path)
    assert "layers-1" in path.read_text()


def test_what_was_not_run_is_listed(project: Project) -> None:
    project.add("tr", 1e-4, 0, None, dev=95.0)
    lines = project.block("missing").splitlines()
    assert {
        "- `ablations`: nothing of it was run",
        "- `small`, `tr`: training of seeds 0, 1, 2",
    } <= set(lines)
    project.add("tr", 1e-3, 0, None, dev=94.0)
    assert (
        "- `small`, `tr`: training of seeds 1, 2; tatoeba of seed 0"
        in project.block("missing").splitlines()
    )


def test_documents_are_made_once_and_checked(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in ("tr", "dap"):
        project.add(run, 1e-4, 0, None, dev=80.0)
        project.add(run, 1e-3, 0, 81.25)
    project.report()
    files = [project.docs, project.readme, *sorted(project.figures.iterdir())]
    before = [path.read_bytes() for path in files]
    assert project.docs.read_text().count("By hand.") == len(BLOCKS)
    assert project.docs.read_text().endswith("The end.")
    project.report("--check")
    assert "as the results say" in capsys.readouterr().out
    project.report()  # the pictures, too, are the same bytes
    assert [path.read_bytes() for path in files] == before

    project.readme.write_text(project.readme.read_text().replace("81.25", "81.26"))
    (project.figures / "loss-small.svg").write_bytes(b"<svg/>")
    changed = [path.read_bytes() for path in files]
    message = r"(?s)README.md: results-comparison\n.*loss-small.svg: the picture\nrun `python -m experiments.report`"
    with pytest.raises(SystemExit, match=message):
        project.report("--check")
    assert [path.read_bytes() for path in files] == changed
    project.add("tr", 1e-3, 0, 81.26)
    with pytest.raises(
        SystemExit,
        match=r"(?s)reproduction.md: comparison-small.*comparison-small.svg: the picture",
    ):
        project.report("--check")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.md has <!-- begin a --> 0 times: put it in"),
        ("<!-- begin a -->", "<!-- end a --> 0 times"),
        (
            "<!-- begin a --><!-- end a --><!-- begin a --><!-- end a -->",
            "<!-- begin a --> 2 times",
        ),
        (
            "<!-- begin a --><!-- begin b --><!-- end a --><!-- end b -->",
            "begin b follows the mark of a",
        ),
        (
            "<!-- end a --><!-- begin a --><!-- begin b --><!-- end b -->",
            "begin a follows the mark of a",
        ),
        (
            "<!-- begin a --><!-- end a --><!-- begin b --><!-- end b --><!-- begin c -->",
            "no block is called c; there",
        ),
    ],
)
def test_marks_that_do_not_fit_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filled(text, {"a": "A", "b": "B"}, Path("f.md"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"record.max_steps": 10}, "{1}: trained with max_steps 10, but tr has 20: train it anew"),
        (
            {"record.pairs a step": 64},
            "{1}: trained with pairs a step 64, but tr has 32: train it anew",
        ),
        (
            {"command": ["experiments.release"]},
            "trained with command experiments.release, but tr has train_dap.py",
        ),
        ({"command": [*LINE[:-1], "200"]}, "{1}: trained without --max_steps 20: train it anew"),
        ({"encoder": "b2"}, r"{0} and {1} differ in encoder \('a1' and 'b2'"),
        ({"record.pooling": "mean"}, r"{0} and {1} differ in pooling \('cls' and 'mean'"),
        ({"seed": 5}, "{1} is the result small/tr-lr0.001/seed-5.json"),
        ({"record.text": {"de": 1, "fi": 3}}, r"differ in fi of text \(2 and 3\)"),
        (
            {"evaluations.tatoeba.settings.max_pairs": None},
            r"differ in max_pairs of tatoeba \(250 and None\)",
        ),
    ],
)
def test_results_that_do_not_fit_are_named(
    project: Project, changes: dict[str, Any], message: str
) -> None:
    paths = [project.add("tr", 1e-3, seed, 80.0) for seed in (0, 1)]
    for path in paths:
        change(
            path,
            {
                "command": LINE,
                "encoder": "a1",
                "record.pooling": "cls",
                "record.text": {"de": 1, "fi": 2},
            },
        )
    project.studies()
    change(paths[1], changes)
    with pytest.raises(ValueError, match=message.format(*paths)):
        project.studies()


def test_what_is_no_result_is_named(project: Project) -> None:
    path = project.add("old", 1e-3, 0, 80.0)
    with pytest.raises(ValueError, match="has small/old: move it away"):
        project.studies()
    path.write_text("{}")
    with pytest.raises(ValueError, match="has no recipe, run"):
        project.studies()


def test_what_is_no_cost_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    assert cost_block(path) == "Not run yet."
    path.write_text("{}")
    with pytest.raises(ValueError, match="cost.json: not written by"):
        cost_block(path)


def test_the_repositorys_own_documents_are_what_its_results_say() -> None:
    """In a fresh process, which shows that tables need no torch."""
    code = "import sys; from experiments.report import main; main(['--check']); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
