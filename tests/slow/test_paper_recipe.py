"""The paper's recipe runs whole with tiny encoders of both classes, and prints its tables.

The commands run in this process. Only sizes, lengths and rates of the recipe are changed.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from conftest import LANGUAGES, REPOSITORY, save, synthetic_pairs, tiny_config
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast

import eval_retrieval
import mine_bitext
import run_xnli
import train_dap
from experiments import run as runner

pytestmark = pytest.mark.slow

RECIPE = REPOSITORY / "experiments" / "recipes" / "paper.yaml"
COMMANDS = {
    "train_dap.py": train_dap.run,
    "eval_retrieval.py": eval_retrieval.run,
    "mine_bitext.py": mine_bitext.run,
    "run_xnli.py": run_xnli.run,
}


def write_bitext(folder: Path, count: int, seed: int) -> None:
    """Write a file of pairs for each language."""
    folder.mkdir(parents=True)
    for language in LANGUAGES:
        pairs = synthetic_pairs(language, count, seed)
        text = "".join(f"{source}\t{target}\n" for source, target in pairs)
        (folder / f"{language}-en.tsv").write_text(text, encoding="utf-8")


def write_bucc(folder: Path, pair: str, split: str, seed: int) -> None:
    """Write a split of BUCC whose ten gold pairs have the same text on both sides."""
    language = pair.split("-")[0]
    same = [text for text, _ in synthetic_pairs("de", 10, seed)]
    texts = {
        language: same + [text for text, _ in synthetic_pairs("fr", 20, seed)],
        "en": same + [text for text, _ in synthetic_pairs("sw", 20, seed)],
    }
    for code, sentences in texts.items():
        lines = [f"{code}-{number}\t{text}\n" for number, text in enumerate(sentences)]
        (folder / f"{pair}.{split}.{code}").write_text("".join(lines), encoding="utf-8")
    gold = "".join(f"{language}-{number}\ten-{number}\n" for number in range(10))
    (folder / f"{pair}.{split}.gold").write_text(gold, encoding="utf-8")


def write_nli(path: Path, count: int) -> None:
    """Write pairs of premise and hypothesis with labels."""
    labels = ("entailment", "neutral", "contradiction")
    rows = []
    for number, (source, target) in enumerate(synthetic_pairs("de", count)):
        rows.append(f"{source}\t{target}\t{labels[number % 3]}\n")
    path.write_text("".join(rows), encoding="utf-8")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write a folder with all that the recipe reads."""
    folder = tmp_path / "data"
    write_bitext(folder / "corpus" / "train", 60, 0)
    write_bitext(folder / "corpus" / "dev", 20, 1)
    write_bitext(folder / "tatoeba", 20, 2)
    for name in ("bucc", "xnli"):
        (folder / name).mkdir()
    for pair in ("fr-en", "de-en", "ru-en", "zh-en"):
        write_bucc(folder / "bucc", pair, "sample", 3)
        write_bucc(folder / "bucc", pair, "training", 4)
    for name in ("dev-en", "test-en", "test-de"):
        write_nli(folder / "xnli" / f"{name}.tsv", 12)
    write_nli(folder / "mnli.tsv", 24)
    return folder


def small(recipe: dict) -> dict:
    """Shrink the recipe: two steps, one seed, one run of XNLI."""
    recipe["train"] |= {"max_steps": 2, "total_train_batch_size": 8, "eval_steps": 2}
    recipe["train"] |= {"save_steps": 2, "logging_steps": 1, "dataloader_num_workers": 0}
    recipe["train"] |= {"use_cpu": True, "disable_tqdm": True}
    recipe["seeds"] = [0]
    recipe["evaluate"]["xnli"] = recipe["evaluate"]["xnli"].replace(
        "--search",
        "--use_cpu --max_steps 1 --learning_rate 1e-3 --max_seq_length 32 "
        "--per_device_train_batch_size 8 --total_train_batch_size 8 --disable_tqdm true",
    )
    recipe["runs"]["layers-4"]["rtl_layers"] = 2  # the tiny encoders have three layers
    return recipe


def test_the_papers_recipe_runs_whole(
    data: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def execute_here(arguments: Sequence[str], log: Path, launcher: Sequence[str] = ()) -> None:
        COMMANDS[arguments[0]]([*arguments[1:]])

    monkeypatch.setattr(runner, "execute", execute_here)
    places = [f"data={data}"]
    for name, kind in (("mbert", "bert"), ("xlmr", "xlm-roberta")):
        config = tiny_config(kind, len(tiny_tokenizer))
        save(tmp_path / name, AutoModelForMaskedLM.from_config(config), tiny_tokenizer)
        places.append(f"{name}={tmp_path / name}")
    recipe = tmp_path / "paper.yaml"
    content = small(yaml.safe_load(RECIPE.read_text(encoding="utf-8")))
    recipe.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    argv = [str(recipe), "--places", *places, "--output_dir", str(tmp_path / "runs")]
    argv += ["--results_dir", str(tmp_path / "results")]

    runner.main([*argv, "--dry_run"])
    planned = capsys.readouterr().out
    assert planned.count("python train_dap.py") == len(content["runs"])
    assert not (tmp_path / "runs").exists()

    runner.main(argv)
    shutil.rmtree(tmp_path / "runs" / "paper" / "mbert-dap-lr5e-05" / "seed-0" / "tatoeba")
    runner.main(argv)  # does again only what is missing
    capsys.readouterr()
    runner.main([*argv, "--list"])
    listed = capsys.readouterr().out.splitlines()
    assert [line for line in listed if "/seed-" in line and not line.endswith(": done")] == []

    runner.main([*argv, "--tables"])
    tables = capsys.readouterr().out
    for run in ("mbert", "xlmr-tr", "xlmr-tlm-release", "mbert-dap"):
        for name in ("tatoeba", "sample-fr", "training-zh", "xnli"):
            assert f"== {name}: {run}, 1 seeds" in tables
    assert "(Table 2)" in tables
    assert "XLM-R+DAP" in tables
