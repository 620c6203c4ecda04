"""The training command, from its text to its model."""

import re
import shutil
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from conftest import (
    LANGUAGES,
    REPOSITORY,
    built,
    load_encoder,
    logged,
    results,
    run,
    save_with_modules,
    state,
    synthetic_pairs,
)
from transformers import AutoModel, TrainerState

import train_dap
from dap_transformers.commands import push_to_hub
from dap_transformers.errors import UserError
from dap_transformers.files import content_digest, read_json
from dap_transformers.pictures import CURVES
from objectives_dap import OBJECTIVES


def test_training_improves_retrieval_and_saves_the_best_model(flags: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = (
        "--objective tr --learning_rate 1e-2 --max_steps 20 --eval_strategy steps --eval_steps 10 "
        "--save_strategy steps --save_steps 10 --load_best_model_at_end --eval_on_start"
    )
    run(f"{flags} {more} --output_dir {out}")
    means = logged(out, "eval_mean_accuracy")
    assert max(means) > means[0] + 20
    assert results(out)["eval_mean_accuracy"] == pytest.approx(max(means))
    if find_spec("matplotlib"):
        assert "<!-- accuracy on dev pairs -->" in (out / CURVES).read_text()
    assert AutoModel.from_pretrained(out).config.model_type == "dap"
    pickles = [path.name for path in out.iterdir() if path.suffix in (".bin", ".pt", ".pth")]
    assert pickles == ["training_args.bin"]  # of the Trainer; `push-to-hub` leaves it out
    with pytest.raises(ValueError, match="finished run"):
        run(f"{flags} --max_steps 2 --output_dir {out}")


def test_a_run_says_if_its_model_is_worse_than_before(
    flags: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = "--objective tr --max_steps 2 --learning_rate 1e-2 --eval_strategy steps --eval_steps 2"
    more += " --eval_on_start --metric_for_best_model eval_kept_neighbours"
    run(f"{flags} {more} --output_dir {tmp_path}/out")
    assert results(tmp_path / "out")["eval_kept_neighbours"] < 100  # as before training
    assert "eval_kept_neighbours is worse than before training" in caplog.text


def test_a_file_of_the_user_adds_an_objective(flags: str, here: Path) -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    code = re.search(r"```py\n(.*?)```", page.split("### An objective")[1], re.DOTALL)[1]
    file = here / "my_loss.py"
    file.write_text(code)
    out = here / "out"
    flags = f"{flags} --max_steps 2 --logging_steps 1 --dev_pairs 0"
    run(f"{flags} --plugin {file} --objective tr+bag --bag_weight 0.25 --output_dir {out}")
    first = state(out)["log_history"][0]
    assert first["loss"] == pytest.approx(first["tr_loss"] + 0.25 * first["bag_loss"], abs=1e-3)
    # The defaults are kept, because the file may change.
    own = {"bag_weight": 0.25, "bag_longest": 32}
    assert own.items() <= read_json(out / "config.json").items()
    own_file = {"plugin files": [["my_loss.py", content_digest(file)]]}
    assert (own | own_file).items() <= read_json(out / "run.json").items()

    # Another process needs the file to train or publish the heads.
    del OBJECTIVES["bag"]
    with pytest.raises(UserError, match=f"{out}: .*no bag.*--plugin"):
        run(f"{flags} --model_name_or_path {out} --objective tr --output_dir further")
    again = shutil.copy(file, here / "again.py")
    place = "--output_dir user/bag --dry_run"
    push = f"{out} --repo_id user/bag --with_heads --plugin {again} {place}"
    push_to_hub.run(push.split())
    assert own.items() <= read_json(here / "user/bag/pretraining/config.json").items()

    # The card has the options, and code that loads the heads after the file is imported.
    card = (here / "user/bag/README.md").read_text()
    assert "| bag longest | 32 |\n| bag weight | 0.25 |" in card
    assert "the Python file of the objective `bag`" in card
    names: dict = {}
    exec(re.findall(r"```python\n(.*?)```", card, re.DOTALL)[-1], names)
    assert names["model"].prediction_head is not None
    del OBJECTIVES["bag"]
    assert load_encoder("user/bag").encode(["ka"]).shape == (1, 32)


def test_ctrl_c_tells_where_the_same_command_begins(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for step in (20, 30):
        checkpoint = tmp_path / f"out/checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        for name in ("rng_state.pth", "optimizer.pt", "scheduler.pt"):
            (checkpoint / name).touch()
    TrainerState().save_to_json(str(tmp_path / "out/checkpoint-20/trainer_state.json"))
    # The checkpoint of step 30 is incomplete.
    for folder, says in (("new", "begins anew"), ("out", "resumes from .*checkpoint-20$")):
        argv = f"{flags} --output_dir {tmp_path / folder}".split()
        with patch("train_dap.train", side_effect=KeyboardInterrupt), pytest.raises(SystemExit):
            train_dap.main(argv)
        assert re.search(says, capsys.readouterr().err.strip())


def test_a_teacher_is_encoded_once_and_pulls_the_vectors(
    flags: str, tiny_bert_dir: Path, tmp_path: Path
) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(tiny_bert_dir, teacher)
    out = tmp_path / "out"
    more = (
        "--objective distill --max_steps 12 --logging_steps 4 --mini_batch_size 8 "
        f"--learning_rate 6e-3 --distill_from {teacher}"
    )
    run(f"{flags} {more} --output_dir {out}")
    losses = logged(out, "distill_loss")
    assert losses[-1] < 0.9 * losses[0]
    (file,) = (out / "teacher").iterdir()
    vectors = np.load(file, mmap_mode="r")
    targets = {pair[1] for language in LANGUAGES for pair in synthetic_pairs(language)}
    assert vectors.shape[1] == 32
    assert len(targets) - 60 <= len(vectors) < len(targets)  # without the dev targets

    # A run on the same text reads this file again, if it is given it.
    again = shutil.copytree(out / "teacher", tmp_path / "again" / "teacher")
    written = (again / file.name).stat().st_mtime_ns
    run(f"{flags} {more} --max_steps 1 --output_dir {tmp_path}/again")
    assert list(again.iterdir()) == [again / file.name]
    assert (again / file.name).stat().st_mtime_ns == written


def test_a_checkpoint_needs_teachers_whose_vectors_have_one_size(
    flags: str, tiny_bert_dir: Path, tmp_path: Path
) -> None:
    teacher = save_with_modules(tmp_path / "teacher", tiny_bert_dir)
    first = tmp_path / "first"
    command = f"{flags} --objective tr+distill --max_steps 1 --dev_pairs 0"
    run(f"{command} --distill_from {teacher} --output_dir {first}")
    command += f" --model_name_or_path {first} --output_dir {tmp_path}/next"
    with pytest.raises(UserError, match="vectors of 8 numbers, and the teacher's have 32"):
        built(command)
    assert built(f"{command} --distill_from {teacher}").model.config.distill_size == 8


def test_english_of_validation_data_is_not_trained_on(
    flags: str, bitext_dir: Path, tmp_path: Path
) -> None:
    pairs = synthetic_pairs("de")[:30]
    file = tmp_path / "sw-en.tsv"
    file.write_text("".join(f"{source}\t{target}.\n" for source, target in pairs))
    trainer = built(f"{flags} --validation_data {file} --output_dir {tmp_path}")
    sizes = Counter(trainer.train_dataset["language"])
    assert sizes == {"de": 170, "fr": 200, "sw": 200}
    assert len(trainer.evaluators[0].pairs["sw"]) == 30

    # Of a dev set beside the text, --dev_pairs 20 takes 20, and none of its targets is trained on.
    corpus = tmp_path / "corpus"
    shutil.copytree(bitext_dir, corpus / "train")
    (corpus / "dev").mkdir()
    file.rename(corpus / "dev" / file.name)
    trainer = built(f"{flags} --train_data {corpus} --output_dir {tmp_path}/again")
    assert len(trainer.train_dataset) == sizes.total()
    found = [source for source, _ in trainer.evaluators[0].pairs["sw"]]
    assert found == [pairs[row * 29 // 19][0] for row in range(20)]
    # A dev set of other languages is none.
    [german] = (corpus / "train").glob("de-en.*")
    trainer = built(f"{flags} --train_data {german} --output_dir {tmp_path}/german")
    assert {code: len(part) for code, part in trainer.evaluators[0].pairs.items()} == {"de": 8}
    # It may be one of mined text.
    mined = corpus / "train" / "mined.tsv"
    rows = ["score\tsource\ttarget\tsource_line\ttarget_line"]
    rows += [f"1.2\t{source}\t{target} again\t1\t1" for source, target in synthetic_pairs("de")]
    mined.write_text("\n".join(rows) + "\n")
    trainer = built(f"{flags} --train_data {mined} --output_dir {tmp_path}/mined")
    assert list(trainer.evaluators[0].pairs) == ["sw"]
