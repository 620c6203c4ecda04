"""The comparison of trainings: means, deviations and differences, in every format."""

import csv
import io
import statistics
from pathlib import Path

import pytest
from conftest import squeezed

from dap_transformers.files import write_json
from dap_transformers.reports.command_line import run
from dap_transformers.reports.merge import merge_seeds
from dap_transformers.reports.records import read_report, report

#: Number of blocks -> seed -> accuracy xx→en. The groups have the seeds 1 and 2 in common.
ACCURACY = {"k1": {0: 88.0, 1: 89.0, 2: 87.5}, "k2": {1: 90.0, 2: 89.5, 3: 91.0}}


@pytest.fixture
def ablation(tmp_path: Path) -> Path:
    """Write a report per seed of two settings, and a merged one."""
    for name, seeds in ACCURACY.items():
        for seed, accuracy in seeds.items():
            numbers = {
                "languages": {"de": {"pairs": 1000, "xx-en": accuracy + 1, "en-xx": 80.0}},
                "averages": {"36 languages": {"xx-en": accuracy, "en-xx": 80.0}},
            }
            settings = {"pooling": "cls", "text": "5f2c", "recipe": name}
            made = report(f"{name}-seed{seed}", "retrieval", numbers, settings, 1.0, seed=seed)
            write_json(made, tmp_path / f"{name}-{seed}.json")
    reports = {str(path): read_report(path) for path in sorted(tmp_path.glob("k2-*"))}
    write_json(merge_seeds(reports), tmp_path / "merged.json")
    return tmp_path


def test_means_deviations_and_differences_by_seed(
    ablation: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = [f"K=1:{ablation}/k1-*.json", f"K=2:{ablation}/k2-*.json"]
    found = run(["--compare", *groups, "--format", "markdown"])
    lines = squeezed(capsys.readouterr().out).splitlines()
    name = "36 languages xx-en"
    for group, seeds in zip(("K=1", "K=2"), ACCURACY.values(), strict=True):
        assert found[group]["mean"][name] == pytest.approx(statistics.fmean(seeds.values()))
        assert found[group]["sd"][name] == pytest.approx(statistics.stdev(seeds.values()))
    assert "| K=1 | 3 | 88.17 ± 0.76 | 80.00 ± 0.00 |" in lines
    assert "| K=2 − K=1 | +1.50 ± 0.71 | +0.00 ± 0.00 |" in lines  # of the seeds 1 and 2
    assert "| K=2 − K=1, seed 1 | +1.00 | +0.00 |" in lines
    assert not [line for line in lines if "seed 3" in line]

    run(["--compare", *groups, "--format", "csv", "--languages"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    values = {(row["group"], row["metric"], row["seed"]): float(row["value"]) for row in rows}
    assert values["K=1", name, "0"] == 88.0
    assert values["K=2 - K=1", "de xx-en", "2"] == 2.0

    run(["--compare", *groups, "--format", "latex", "--output", str(ablation / "table.tex")])
    table = squeezed((ablation / "table.tex").read_text())
    assert r"K=1 & 3 & 88.17 $\pm$ 0.76 & 80.00 $\pm$ 0.00 \\" in table
    assert table.count(r"\toprule") == 2


def test_a_merged_report_is_compared_by_its_mean(
    ablation: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named_like_a_pattern = (ablation / "merged.json").rename(ablation / "merged[2].json")
    run(["--compare", f"a:{ablation}/k1-*.json", f"b:{named_like_a_pattern}"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("b − a")]
    assert line.split()[3:] == ["+2.00", "+0.00"]


def test_groups_that_cannot_be_compared_are_refused(ablation: Path) -> None:
    for groups, named in (
        ([f"a:{ablation}/k1-*.json"], "two groups"),
        ([f"{ablation}/k1-0.json"], "give a name first"),
        ([f"a:{ablation}/k1-*", f"b:{ablation}/k2-1.json", f"{ablation}/merged.json"], "alone"),
    ):
        with pytest.raises(ValueError, match=named):
            run(["--compare", *groups])
    other = read_report(ablation / "k2-1.json")
    write_json(other | {"protocol": "another"}, ablation / "other.json")
    with pytest.raises(ValueError, match="only one of them has"):
        run(["--compare", f"a:{ablation}/k1-*.json", f"b:{ablation}/other.json"])
    output = str(ablation / "k1-0.json")
    with pytest.raises(ValueError, match="would overwrite the input"):
        run(["--compare", f"a:{output}", f"b:{ablation}/k2-1.json", "--output", output])
    with pytest.raises(FileNotFoundError, match="none-"):
        run(["--compare", f"a:{ablation}/none-*.json", "b:x.json"])
