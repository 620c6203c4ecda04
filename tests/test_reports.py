"""Reports: what they hold, how seeds are merged, and what the seed of a training is."""

import statistics
from pathlib import Path

import pytest

from dap_transformers.errors import UserError
from dap_transformers.files import write_json
from dap_transformers.reports import (
    RECORD,
    mean_of,
    merge_seeds,
    read_report,
    report,
    training_seed,
)

FORWARD = (90.0, 92.5, 91.0)  # accuracy by seed


def retrieval_report(seed: int) -> dict:
    numbers = {
        "languages": {"de": {"pairs": 1000, "xx-en": FORWARD[seed], "en-xx": 80.0}},
        "source": {"repeated": seed},
        "metrics": [{"name": "accuracy", "value": FORWARD[seed]}],
    }
    return report("out", "retrieval", numbers, {"pooling": "cls"}, 2.342, "abc", seed)


def test_a_report_says_what_is_needed_to_get_the_number_again(tmp_path: Path) -> None:
    made = retrieval_report(0)
    told = {"model": "out", "revision": "abc", "protocol": "retrieval", "seed": 0, "seconds": 2.34}
    assert made.items() >= (told | {"settings": {"pooling": "cls"}}).items()
    assert {"python", "torch", "transformers"} <= set(made["versions"])
    assert made["machine"]["cpu"]
    write_json(made, tmp_path / "a.json")
    assert read_report(tmp_path / "a.json") == made
    (tmp_path / "a.json").write_text('{"model": "out"}')
    with pytest.raises(UserError, match=r"a\.json"):
        read_report(tmp_path / "a.json")


def test_every_number_becomes_mean_and_sample_standard_deviation() -> None:
    merged = merge_seeds([retrieval_report(seed) for seed in range(3)])
    german = merged["languages"]["de"]
    assert german["xx-en"]["mean"] == mean_of(german["xx-en"]) == pytest.approx(sum(FORWARD) / 3)
    assert german["xx-en"]["sd"] == pytest.approx(statistics.stdev(FORWARD))
    assert german["en-xx"] == {"mean": 80.0, "sd": 0.0}
    assert german["pairs"] == 1000
    assert merged["source"]["repeated"] == {"mean": 1.0, "sd": 1.0}
    assert (merged["n"], merged["seeds"], merged["models"]) == (3, [0, 1, 2], ["out"] * 3)
    assert merged["metrics"] == [{"name": "accuracy", "value": german["xx-en"]}]
    one = merge_seeds([retrieval_report(1)])
    assert one["languages"]["de"]["xx-en"] == {"mean": 92.5, "sd": None}


def test_the_seed_of_a_training_is_in_its_record(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-20"
    checkpoint.mkdir()
    assert training_seed(str(checkpoint)) is training_seed("user/model") is None
    write_json({"seed": 3}, tmp_path / RECORD)
    assert training_seed(str(checkpoint)) == training_seed(str(tmp_path)) == 3
    (tmp_path / "encoder").mkdir()
    assert training_seed(str(tmp_path / "encoder")) is None
