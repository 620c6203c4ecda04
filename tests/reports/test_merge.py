"""Reports: what they hold, how seeds are merged, and that only equal evaluations are merged."""

import json
import statistics
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from dap_transformers.evaluation.paper import BUCC_PAIRS
from dap_transformers.files import write_json
from dap_transformers.reports.command_line import run
from dap_transformers.reports.merge import merge_seeds, paper_beside
from dap_transformers.reports.records import RECORD, read_report, report, training_record


def test_report_says_what_is_needed_to_get_the_number_again() -> None:
    made = report(
        "user/model", "Tatoeba", {"score": 1.5}, {"pooling": "cls"}, 2.342, revision="abc", seed=7
    )
    told = {
        "model": "user/model",
        "revision": "abc",
        "protocol": "Tatoeba",
        "seed": 7,
        "score": 1.5,
        "seconds": 2.34,
    }
    assert made.items() >= (told | {"settings": {"pooling": "cls"}}).items()
    assert {"python", "torch", "transformers"} <= set(made["versions"])
    assert made["machine"]["cpu"]
    assert json.loads(json.dumps(made)) == made


SETTINGS = {"pooling": "cls", "data": ["tatoeba"], "text": "5f2c"}


def retrieval_report(seed: int, forward: float) -> dict[str, Any]:
    numbers = {
        "languages": {"de": {"pairs": 1000, "xx-en": forward, "en-xx": forward - 1.0}},
        "averages": {"36 languages": {"xx-en": forward - 3.0, "en-xx": 50.0}},
    }
    return report(f"runs/dap-seed{seed}", "bitext retrieval", numbers, SETTINGS, 1.0, seed=seed)


ANOTHER = {"pairs": 1, "xx-en": 1.0, "en-xx": 2.0}
FORWARD = (90.0, 92.5, 91.0)


def written(folder: Path, reports: list[dict[str, Any]]) -> list[str]:
    """Paths of the reports: 0.json, 1.json, ..."""
    paths = [str(folder / f"{number}.json") for number in range(len(reports))]
    for path, content in zip(paths, reports, strict=True):
        write_json(content, path)
    return paths


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    return written(
        tmp_path, [retrieval_report(seed, forward) for seed, forward in enumerate(FORWARD)]
    )


def test_every_number_becomes_mean_and_sample_standard_deviation(three: list[str]) -> None:
    merged = merge_seeds({path: read_report(path) for path in three})
    spread = {
        "mean": pytest.approx(statistics.mean(FORWARD)),
        "sd": pytest.approx(statistics.stdev(FORWARD)),
    }
    assert merged["languages"]["de"]["xx-en"] == spread
    assert merged["languages"]["de"]["pairs"] == 1000
    assert merged["averages"]["36 languages"]["en-xx"] == {"mean": 50.0, "sd": 0.0}
    assert (merged["n"], merged["seeds"], merged["model"]) == (3, [0, 1, 2], "runs/dap-seed*")
    assert merged["settings"] == SETTINGS
    assert len(merged["versions"]) == 3
    assert (
        merge_seeds({path: read_report(path) for path in three[::-1]})["averages"]
        == merged["averages"]
    )
    with pytest.raises(ValueError, match="no reports to merge"):
        merge_seeds({})


def test_the_command_prints_the_paper_beside_and_writes_the_merged_report(
    three: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merged = run([*three, "--output", str(tmp_path / "merged.json")])
    assert json.loads((tmp_path / "merged.json").read_text()) == merged
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["languages", "de", "91.17", "±", "1.26", "90.17", "±", "1.26"] in lines
    assert ["de", "German", "1000", "91.2", "99.1", "99.2", "90.2", "98.9", "98.9"] in lines
    assert ["dap-seed*", "(n=3)", "-", "-", "88.2", "-", "-", "50.0"] in lines
    assert ["paper:", "XLM-R+DAP", "95.0", "94.7", "91.3", "95.1", "95.2", "92.7"] in lines


def test_a_report_on_fewer_pairs_is_not_compared_with_the_paper() -> None:
    assert paper_beside(retrieval_report(0, 90.0)) is not None
    assert (
        paper_beside(retrieval_report(0, 90.0) | {"settings": {**SETTINGS, "max_pairs": 250}})
        is None
    )


def test_one_report_has_no_deviation(three: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(three[:1])["languages"]["de"]["xx-en"] == {"mean": 90.0, "sd": None}
    assert ["languages", "de", "90.00", "89.00"] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]


def test_xnli_reports_stand_beside_the_papers_xnli(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [
        {"languages": {"de": {"pairs": 8, "accuracy": 60.0 + seed}}, "dev": {"accuracy": 70.0}}
        for seed in (0, 1)
    ]
    run(
        written(
            tmp_path,
            [report("mbert", "XNLI", each, {}, 1.0, seed=seed) for seed, each in enumerate(made)],
        )
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["mbert", "(n=2)", "-", "-", "-", "60.5", *"-" * 12] in lines
    assert ["languages", "de", "60.50", "±", "0.71"] in lines


def mining_report(pair: str, seed: int, f1: float, protocol: str = "sample") -> dict[str, Any]:
    numbers = {
        "precision": 90.0,
        "recall": 80.0,
        "f1": f1,
        "threshold": 1.0625,
        "extracted": 10 + seed,
        "gold": 12,
    }
    settings = {"margin": "ratio", "pair": pair}
    return report(
        f"dap-seed{seed}",
        f"BUCC {protocol}: best F1",
        {"pairs": {pair: numbers}},
        settings,
        1.0,
        seed=seed,
    )


def test_mining_reports_of_all_pairs_and_seeds_give_the_papers_average(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        (pair, seed, 84.0 + 2 * i + seed) for i, pair in enumerate(BUCC_PAIRS) for seed in range(2)
    ]
    merged = run(written(tmp_path, [mining_report(*each) for each in runs]))
    assert merged["pairs"]["zh-en"]["f1"] == {"mean": 90.5, "sd": pytest.approx(0.5**0.5)}
    assert merged["pairs"]["zh-en"]["gold"] == 12
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    ours = [["90.0", "80.0", f"{84.5 + 2 * i}"] for i in range(4)]
    assert ["dap-seed*", "(n=2)", *sum(ours, []), "87.5"] in lines
    table_2 = [line for line in lines if line[:2] == ["paper:", "XLM-R+DAP"]]
    assert [line[-1] for line in table_2] == ["95.4"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            mining_report("fr-en", 0, 80.0, "training-optimal"),
            "has protocol 'BUCC sample: .*'BUCC training-optimal: ",
        ),
        (mining_report("fr-en", 1, 80.0), r"0.json has the seeds \[0\], .*1.json has \[1\]"),
    ],
)
def test_pairs_of_other_protocols_or_seeds_are_refused(
    tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(written(tmp_path, [mining_report("de-en", 0, 90.0), other]))


def test_a_protocol_that_the_paper_does_not_have_stands_beside_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(written(tmp_path, [mining_report("zh-en", 0, 90.0, "training-optimal")]))
    printed = capsys.readouterr().out
    assert "1.0625" in printed
    assert "paper" not in printed


def changed(place: str, value: Any) -> dict[str, Any]:
    """The report of seed 1 with another value at a place such as "settings pooling"; None removes
    it."""
    content: dict[str, Any] = retrieval_report(1, 92.5)
    content["settings"] = dict(SETTINGS)
    *parents, last = place.split(".")
    node = reduce(getitem, parents, content)
    node.pop(last, None)
    if value is not None:
        node[last] = value
    return content


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("protocol", "mining", "0.json has protocol 'bitext retrieval', .*1.json has 'mining'"),
        ("settings.pooling", "mean", "0.json has settings.pooling 'cls', .*1.json has 'mean'"),
        ("settings.text", "77aa", "0.json has settings.text '5f2c', .*1.json has '77aa'"),
        ("settings.recipe", "1e8d", "0.json has settings.recipe None, .*1.json has '1e8d'"),
        (
            "model",
            "runs/tr-seed1",
            r"0.json has model 'runs/dap-seed\*', .*1.json has 'runs/tr-seed\*'",
        ),
        ("languages.fr", ANOTHER, "only one of .*0.json and .*1.json has 'languages fr'"),
        ("languages.de.own_en-xx", 1.0, "only one of .* has 'languages de own_en-xx'"),
        ("languages.de.pairs", 999, "languages de pairs: .*0.json has 1000, .*1.json has 999"),
    ],
)
def test_reports_of_other_evaluations_are_refused(
    three: list[str], place: str, value: Any, message: str
) -> None:
    write_json(changed(place, value), three[1])
    with pytest.raises(ValueError, match=message):
        run(three)


@pytest.mark.parametrize("of_recipe", [{}, {"recipe": "1e8d"}])
def test_one_run_is_not_taken_for_two_seeds(three: list[str], of_recipe: dict[str, str]) -> None:
    for path, copy_of in zip(three, ("seed0", "seed0", "seed2"), strict=True):
        name = {"model": "runs/dap-seed0" if not of_recipe else path, "seed": int(copy_of[-1])}
        write_json(retrieval_report(0, 90.0) | name | {"settings": SETTINGS | of_recipe}, path)
    with pytest.raises(
        ValueError,
        match="0.json and .*1.json have the same model .* and seed 0",
    ):
        run(three)


@pytest.mark.parametrize(
    ("own", "key", "found"),
    [
        # several models may have been fine-tuned with one seed
        ([{"seed": 42}] * 3, "seeds", [42, 42, 42]),
        # the same text may lie in another folder
        ([{}, {"settings": SETTINGS | {"data": ["elsewhere"]}}, {}], "n", 3),
        # models of one recipe may have any name
        (
            [{"model": name, "settings": SETTINGS | {"recipe": "1e8d"}} for name in "abc"],
            "models",
            ["a", "b", "c"],
        ),
    ],
)
def test_seeds_folders_and_names_may_differ(
    tmp_path: Path, own: list[dict[str, Any]], key: str, found: object
) -> None:
    reports = [retrieval_report(seed, FORWARD[seed]) | more for seed, more in enumerate(own)]
    assert run(written(tmp_path, reports))[key] == found


@pytest.mark.parametrize("bucc", ["bucc2018", "elsewhere/bucc2018"])
def test_mining_reports_of_one_text_may_come_from_several_folders(
    tmp_path: Path, bucc: str
) -> None:
    reports = [mining_report("zh-en", seed, 84.0 + seed) for seed in (0, 1)]
    for made, folder in zip(reports, ("bucc2018", bucc), strict=True):
        made["settings"] |= {"bucc": folder, "text": "5f2c"}
        made["seconds_by_part"] = {"encoding": float(len(folder))}
    merged = run(written(tmp_path, reports))
    assert merged["n"] == 2
    assert "seconds_by_part" not in merged  # a time is not a result


def test_pairs_of_several_languages_keep_the_digests_of_their_texts(tmp_path: Path) -> None:
    reports = [mining_report(pair, 0, 84.0) for pair in ("fr-en", "de-en")]
    for made in reports:
        made["settings"]["text"] = f"text of {made['settings']['pair']}"
    merged = run(written(tmp_path, reports))
    assert merged["settings"]["pair"] == ["fr-en", "de-en"]
    assert merged["settings"]["text"] == ["text of fr-en", "text of de-en"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"model": "m", "protocol": "p", "score": NaN}',
        '{"model": "m", "protocol": "p", "score": 1e999}',
        "[]",
        '{"score": 1}',
        '{"model": "m", "protocol": "p", "seeds": [1]}',
        '{"model": "m", "protocol": "p"}',
    ],
)
def test_files_that_are_not_reports_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"a\.json"):
        run([str(tmp_path / "a.json")])


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("settings", ["a"]),
        ("settings.data", 3),
        ("settings.data", [3]),
        ("settings.pair", ["de-en", 1]),
        ("seed", "1"),
        ("languages", ["de"]),
        ("languages.de", 90.0),
        ("languages.de.xx-en", "90.0"),
        ("languages.de.xx-en", {"mean": 1.0, "sd": "x"}),
        ("languages.de.pairs", None),
        ("averages.36 languages.en-xx", None),
        ("averages.36 languages", [1]),
        ("threshold_choice", {"calibrated": True, "threshold": "1", "precision": 0.5}),
    ],
)
def test_wrong_values_in_a_report_are_refused_by_their_place(
    tmp_path: Path, place: str, value: Any
) -> None:
    write_json(changed(place, value), tmp_path / "a.json")
    with pytest.raises(ValueError, match=rf"a\.json: '{place.replace('.', ' ')}.* expected "):
        read_report(tmp_path / "a.json")


def test_a_report_that_counts_its_pairs_is_merged(tmp_path: Path) -> None:
    made = []
    for seed in (1, 2):
        numbers = {"pairs": 8, "links": 20 + seed}
        made.append(report(f"m-seed{seed}", "word alignment", numbers, {}, 1.0, seed=seed))
    assert run(written(tmp_path, made))["links"]["mean"] == 21.5
    made[0]["protocol"] = "BUCC sample: best F1"
    with pytest.raises(ValueError, match=r"0\.json: 'pairs' is 8, expected an object"):
        run(written(tmp_path, made[:1]))


def test_a_report_that_is_given_twice_or_missing_is_refused(three: list[str]) -> None:
    with pytest.raises(ValueError, match=r"0\.json is given twice"):
        run([*three, three[0]])
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        run(["absent.json"])


def test_the_recipe_of_a_training_does_not_depend_on_its_seed(
    tmp_path: Path,
) -> None:
    def recipe(**run: Any) -> tuple[int | None, str | None]:
        write_json(
            {"learning_rate": 5e-5, "training text": {"de": f"{run} pairs"}} | run,
            tmp_path / RECORD,
        )
        return training_record(str(tmp_path))

    first, same = recipe(seed=1)
    second, again = recipe(seed=2)
    _, other = recipe(seed=1, learning_rate=1e-5)
    assert (first, second) == (1, 2)
    assert same == again != other
    assert recipe(seed=1, target_vocab_size=7)[1] == same  # comes from the text of this seed
    own = [
        recipe(seed=1, target_vocabulary_file="v.json", target_vocab_size=size)[1]
        for size in (7, 8)
    ]
    assert len({same, *own}) == 3
    recipe(seed=1, learning_rate=1e-5)
    checkpoint = tmp_path / "checkpoint-20"
    checkpoint.mkdir()
    assert training_record(str(checkpoint))[0] == 1
    assert training_record(str(checkpoint))[1] != other  # an earlier step is another recipe
    (tmp_path / "encoder").mkdir()
    assert (
        training_record(str(tmp_path / "encoder")) == training_record("user/model") == (None, None)
    )

    for wrong in ({"seed": "1"}, {"seed": True}, {"seed": 1, "training text": ["de"]}):
        write_json(wrong, tmp_path / RECORD)
        with pytest.raises(ValueError, match=r"run.json: '(seed|training text)' is .*, expected"):
            training_record(str(tmp_path))
