"""The paper's recipe, and that of ready encoders, run whole with tiny encoders.

The commands run in this process. Only sizes, lengths and rates of the recipes are changed.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import LANGUAGES, REPOSITORY, save, synthetic_pairs, tiny_config
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast

import eval_retrieval
import run_xnli
import train_dap
from benchmarks import flops
from dap_transformers.commands import mine as mine_bitext
from experiments import run as runner

pytestmark = pytest.mark.slow

RECIPES = REPOSITORY / "experiments" / "recipes"
COMMANDS = {
    "benchmarks.flops": flops.main,
    "train_dap.py": train_dap.run,
    "eval_retrieval.py": eval_retrieval.run,
    "dap_transformers/commands/mine.py": mine_bitext.run,
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
    shutil.copy(folder / "tatoeba" / "de-en.tsv", folder / "tatoeba" / "ar-en.tsv")  # for Figure 1
    for name in ("bucc", "xnli"):
        (folder / name).mkdir()
    for pair in ("fr-en", "de-en", "ru-en", "zh-en"):
        write_bucc(folder / "bucc", pair, "sample", 3)
        write_bucc(folder / "bucc", pair, "training", 4)
    for name in ("dev-en", "test-en", "test-de"):
        write_nli(folder / "xnli" / f"{name}.tsv", 12)
    write_nli(folder / "mnli.tsv", 24)
    return folder


def fine_tuned_briefly(command: str) -> str:
    """Replace the search of an XNLI command by one step."""
    return command.replace(
        "--search",
        "--use_cpu --max_steps 1 --learning_rate 1e-3 --max_seq_length 32 "
        "--per_device_train_batch_size 8 --total_train_batch_size 8 --disable_tqdm true",
    )


def small(recipe: dict) -> dict:
    """Shrink the paper's recipe: two steps, one seed, one run of XNLI."""
    recipe["train"] |= {"max_steps": 2, "total_train_batch_size": 8, "eval_steps": 2}
    recipe["train"] |= {"save_steps": 2, "logging_steps": 1, "dataloader_num_workers": 0}
    recipe["train"] |= {"use_cpu": True, "disable_tqdm": True}
    recipe["seeds"] = [0]
    evaluate = recipe["evaluate"]
    evaluate["xnli"] = fine_tuned_briefly(evaluate["xnli"])
    evaluate["cost"] = "benchmarks.flops --size tiny --batch_size 2 --repeats 1 --json {result}"
    return recipe


def write_recipe(content: dict, path: Path) -> None:
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def encoder(kind: str, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """Save a tiny masked-LM model of four layers, which the deepest RTL head needs."""
    config = tiny_config(kind, len(tokenizer))
    config.num_hidden_layers = 4
    return save(folder, AutoModelForMaskedLM.from_config(config), tokenizer)


@pytest.fixture(autouse=True)
def commands_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def execute_here(arguments: Sequence[str], log: Path, launcher: Sequence[str] = ()) -> Any:
        return COMMANDS[arguments[0]]([*arguments[1:]])

    monkeypatch.setattr(runner, "execute", execute_here)


def test_the_papers_recipe_runs_whole(
    data: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = [f"data={data}"]
    for name, kind in (("mbert", "bert"), ("xlmr", "xlm-roberta")):
        places.append(f"{name}={encoder(kind, tiny_tokenizer, tmp_path / name)}")
    recipe = tmp_path / "paper.yaml"
    content = small(yaml.safe_load((RECIPES / "paper.yaml").read_text(encoding="utf-8")))
    write_recipe(content, recipe)
    argv = [str(recipe), "--places", *places, "--output_dir", str(tmp_path / "runs")]
    argv += ["--results_dir", str(tmp_path / "results")]

    runner.main([*argv, "--dry_run"])
    planned = capsys.readouterr().out
    assert planned.count("python train_dap.py") == len(content["runs"]) - 1  # all but "cost"
    assert planned.count("python -m benchmarks.flops") == 1
    assert not (tmp_path / "runs").exists()

    runner.main(argv)
    shutil.rmtree(tmp_path / "runs" / "paper" / "mbert-dap-lr5e-05" / "seed-0" / "tatoeba")
    runner.main(argv)  # does again only what is missing
    capsys.readouterr()
    runner.main([*argv, "--list"])
    listed = capsys.readouterr().out.splitlines()
    assert [line for line in listed if "/seed-" in line and not line.endswith(": done")] == []

    figures = tmp_path / "figures"
    runner.main([*argv, "--tables", "--figures", str(figures)])
    printed = capsys.readouterr().out
    print(printed)  # pytest -rP shows it
    # Tables 1 to 8, then the numbers of Figures 3 and 4, then the pictures.
    *tables, last = printed.split("\n\n")
    last, *pictures = last.splitlines()[:-3], *last.splitlines()[-3:]
    tables.append("\n".join(last))
    titles = ["Table 1", "BUCC sample (Table 2)", "BUCC training (Table 3)", "XNLI (Table 4)"]
    titles += ["Table 5", "Table 6", "Table 7", "Table 8", "Figure 3", "Figure 4"]
    assert [table[: len(title)] for table, title in zip(tables, titles, strict=True)] == titles
    for table in tables[:4]:
        for run in ("mbert", "mbert-dap", "xlmr-tr", "xlmr-tlm-release"):
            assert f"\n{run} (n=1)" in table
    assert [line.split("/")[-1][:8] for line in pictures] == ["figure-1", "figure-3", "figure-4"]
    assert len(list(figures.iterdir())) == 3


def test_the_recipe_of_ready_encoders_takes_any_list(
    data: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One model is as E5, one as LaBSE with a dense layer after the pooling, one is plain."""
    library = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.models")
    plain = encoder("xlm-roberta", tiny_tokenizer, tmp_path / "plain")
    for name in ("e5", "labse"):
        parts = [modules.Transformer(str(plain)), modules.Pooling(32, "mean")]
        if name == "labse":
            parts.append(modules.Dense(32, 32))
        parts.append(modules.Normalize())
        library.SentenceTransformer(modules=parts, device="cpu").save(str(tmp_path / name))
    content = yaml.safe_load((RECIPES / "ready.yaml").read_text(encoding="utf-8"))
    content["evaluate"]["xnli"] = fine_tuned_briefly(content["evaluate"]["xnli"])
    content["runs"] = {
        "e5": {"model": "{e5}", "prefix": "query: "},
        "labse": {"model": "{labse}"},
        "plain": {"model": "{plain}", "pooling": "cls"},
    }
    recipe = tmp_path / "ready.yaml"
    write_recipe(content, recipe)
    places = [f"{name}={tmp_path / name}" for name in content["runs"]]
    argv = [str(recipe), "--places", f"data={data}", *places]
    argv += ["--output_dir", str(tmp_path / "runs"), "--results_dir", str(tmp_path / "results")]
    runner.main(argv)
    capsys.readouterr()
    runner.main([*argv, "--tables"])
    printed = capsys.readouterr().out
    runner.main([*argv, "--list"])
    assert capsys.readouterr().out.count(": done\n") == 3
    print(printed)  # pytest -rP shows it
    for name in content["runs"]:
        assert printed.count(f"\n{name} (n=1)") == 4  # Tables 1 to 4
