"""Recipes and their runner.

Commands run in this process on tiny models, or on folders like those of finished runs.
"""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY, results
from transformers import BertConfig

import eval_retrieval
import train_dap
from configuration_dap import DAPConfig
from dap_transformers.commands.edge import claimed
from dap_transformers.files import write_json
from dap_transformers.reports.records import RECORD
from dap_transformers.training.arguments import given_fields, parse_arguments
from dap_transformers.training.resume import FINISHED
from experiments import run as runner
from experiments import step_cost
from experiments.recipes import flags, read_recipe
from experiments.run import BEGUN, Job, Workspace, commit, work
from experiments.statistics import DEV


def tell(folder: Path, **content: object) -> Path:
    """Write a recipe."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"name": "study", **content}, sort_keys=False))
    return path


@pytest.fixture
def study(tmp_path: Path) -> Callable[..., Workspace]:
    """Return a function that makes the workspace of a recipe with learning rate 1 by default."""

    def make(**content: object) -> Workspace:
        recipe = read_recipe(tell(tmp_path, **{"train": {"learning_rate": 1.0}, **content}), {})
        return Workspace(recipe, tmp_path / "runs", tmp_path / "results")

    return make


def job_of(workspace: Workspace, run: str, *evaluate: str) -> Job:
    return Job(workspace.recipe.runs[run], 0, 1.0, evaluate)


def finish(folder: Path, accuracy: float = 50.0) -> None:
    """Write the files that a finished training leaves in its folder."""
    history = [{"loss": 2.0, "step": 1}, {"eval_loss": 1.0, "step": 1}]
    contents = {
        BEGUN: {"commit": "abc"},
        RECORD: {"objective": "tr"},
        "config.json": {"model_type": "dap"},
        "trainer_state.json": {"log_history": history},
        "eval_results.json": {DEV: accuracy},
        FINISHED: {"train_runtime": 1.0},
    }
    for name, content in contents.items():
        write_json(content, folder / name)


def test_a_study_is_carried_out_once(
    tiny_bert_dir: Path, short_bitext_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def execute_here(arguments: Sequence[str], log: Path, launcher: Sequence[str] = ()) -> None:
        ran.append([*arguments])
        {"train_dap.py": train_dap, "eval_retrieval.py": eval_retrieval}[arguments[0]].run(
            [*arguments[1:]]
        )

    monkeypatch.setattr(runner, "execute", execute_here)
    monkeypatch.setattr(runner, "PROBE_STEPS", 3)
    monkeypatch.setattr(runner, "PROBE_LOGGING", 1)
    data = tmp_path / "a {folder} with spaces"
    shutil.copytree(short_bitext_dir, data)
    train = {
        "model_name_or_path": "{encoder}",
        "train_data": "{data}",
        "max_steps": 2,
        "dev_pairs": 10,
        "seed": 7,
    }
    train |= {
        "total_train_batch_size": 8,
        "learning_rate": 1e-3,
        "head_steps": 2,
        "eval_strategy": "no",
        "save_strategy": "no",
    }
    train |= {
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "max_seq_length": 16,
    }
    evaluate = (
        "eval_retrieval.py --model {model} --data_dir {data} --max_pairs 20 --output_file {result}"
    )
    runs = {"tr": {"objective": "tr"}, "dap": {"seeds": [3], "tr_hard_negatives": 0.5}}
    runs["tr-same-time"] = {"like": "tr", "same_time_as": "dap", "evaluate": []}
    runs["tr-timed"] = {"like": "tr", "seconds": 0.1, "evaluate": []}
    recipe = tell(tmp_path, train=train, evaluate={"found": evaluate}, runs=runs)
    places = [
        str(recipe),
        "--places",
        f"encoder={tiny_bert_dir}",
        f"data={data}",
        "--output_dir",
        str(tmp_path),
    ]
    argv = [*places, "--results_dir", str(tmp_path / "results")]
    with pytest.raises(
        SystemExit, match=r"^error: tr-same-time-lr0.001/seed-0: .*experiments.step_cost writes it$"
    ):
        runner.main(argv)
    for name in ("tr", "dap"):  # the second keeps what the first has measured
        step_cost.main([*argv, "--repeats", "1", "--only", name])
    runner.main(argv)
    trained = ["train_dap.py", "eval_retrieval.py"] * 2 + ["train_dap.py"] * 3
    assert sorted(line[0] for line in ran) == sorted(trained)
    probe = json.loads((tmp_path / "study/tr-timed-probe.json").read_text())
    timed = json.loads((tmp_path / "results/study/tr-timed-lr0.001/seed-0.json").read_text())
    steps = max(1, round(0.1 / probe["seconds"]))
    assert timed["curve"][-1]["step"] == steps
    assert not (tmp_path / "study/tr-timed-probe").exists()

    folder, collected = (
        tmp_path / "study/dap-lr0.001/seed-3",
        tmp_path / "results/study/dap-lr0.001/seed-3.json",
    )
    content = json.loads(collected.read_text())
    assert content["record"]["seed"] == content["record"]["data_seed"] == content["seed"] == 3
    assert [line["step"] for line in content["curve"]] == [1, 2]
    assert {DEV, "eval_rtl_loss"} <= content["dev"].keys()
    assert content["dev"].items() <= results(folder).items()
    assert (content["config"]["objective"], content["command"][0]) == ("tr+rtl", "train_dap.py")
    trained = dict(zip(content["command"][1::2], content["command"][2::2], strict=True))
    assert (trained["--seed"], trained["--learning_rate"], trained["--max_steps"]) == (
        "3",
        "0.001",
        "2",
    )
    assert (
        content["encoder"]
        == hashlib.sha256((tiny_bert_dir / "model.safetensors").read_bytes()).hexdigest()[:12]
    )
    assert content["evaluations"]["found"]["settings"]["data"] == [data.name]

    before = collected.stat().st_ino  # another file takes its place when it is written
    runner.main(argv)
    assert len(ran) == 7
    assert collected.stat().st_ino == before
    shutil.rmtree(folder / "found")  # as if killed after the training
    runner.main(argv)
    assert [line[0] for line in ran[7:]] == ["eval_retrieval.py"]
    assert json.loads(collected.read_text())["record"] == content["record"]


def test_the_search_takes_the_rate_of_the_best_accuracy(
    study: Callable[..., Workspace], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {
        "train": {},
        "seeds": [4, 5],
        "learning_rates": [1.0, 2.0, 3.0],
        "evaluate": {"e": "x.py {model}"},
    }
    workspace = study(**content, runs={"tr": None, "long": {"like": "tr", "max_steps": 9}})
    tr, long = workspace.recipe.runs.values()
    done: list[Job] = []

    def carry_out(workspace: Workspace, job: Job) -> None:
        done.append(job)
        finish(workspace.folder(job), {1.0: 10.0, 2.0: 30.0, 3.0: 20.0}[job.learning_rate])

    monkeypatch.setattr(Workspace, "carry_out", carry_out)
    with pytest.raises(ValueError, match="long: the search for its learning rate has not ended"):
        step_cost.model_folder(workspace, long)
    assert work(workspace, None) == []
    searched = [Job(tr, 4, rate, ()) for rate in (1.0, 2.0, 3.0)]
    assert done == [
        *searched,
        *(Job(run, seed, 2.0, ("e",)) for seed in (4, 5) for run in (tr, long)),
    ]
    with pytest.raises(ValueError, match="long-lr2/seed-4 has no finished model"):
        step_cost.model_folder(workspace, long)
    (workspace.folder(searched[0]) / "eval_results.json").unlink()
    with pytest.raises(ValueError, match="tr-lr1/seed-4 has no eval_mean_accuracy.*dev_pairs"):
        work(workspace, None)


def test_a_run_of_the_same_time_has_as_many_steps_as_that_is_worth(
    study: Callable[..., Workspace],
) -> None:
    train = {"learning_rate": 0.5, "max_steps": 100, "objective": "tr"}
    runs = {
        "tr": {"command": "own.py"},
        "dap": {"objective": "tr+rtl"},
        "same": {"like": "tr", "same_time_as": "dap"},
    }
    runs["own"] = {"like": "tr", "same_time_as": "tr"}
    workspace = study(train=train, runs=runs)
    same, own = (Job(workspace.recipe.runs[name], 3, 0.5, ()) for name in ("same", "own"))
    write_json({"steps": {"dap": {"cpu": 3.0}}}, workspace.timing)
    with pytest.raises(ValueError, match="timing.json has no tr: "):
        workspace.arguments(same)
    write_json({"steps": {"tr": {"cpu": 2.0}, "dap": {"cpu": 3.1}}}, workspace.timing)
    expected = {
        "objective": "tr",
        "max_steps": 155,
        "learning_rate": 0.5,
        "seed": 3,
        "data_seed": 3,
    }
    assert workspace.arguments(same) == expected
    assert workspace.arguments(own)["max_steps"] == 100
    assert same.run.command == "own.py"
    assert step_cost.compared(workspace).keys() == {"dap", "tr"}


def test_a_run_of_the_same_total_time_pays_for_its_heads(study: Callable[..., Workspace]) -> None:
    train = {"learning_rate": 0.5, "max_steps": 100, "objective": "tr"}
    runs = {
        "tr": None,
        "dap": {"objective": "tr+rtl", "total_time_as": "tr"},
        "control": {"like": "dap", "command": "own.py"},
    }
    workspace = study(train=train, runs=runs)
    jobs = [Job(workspace.recipe.runs[name], 3, 0.5, ()) for name in ("dap", "control")]
    times = {"tr": {"cpu": 2.0}, "dap": {"cpu": 4.0}}
    with pytest.raises(ValueError, match="timing.json has no tr: "):
        workspace.arguments(jobs[0])
    write_json({"steps": times, "heads": {"tr": 0.0, "dap": 80.0}}, workspace.timing)
    assert [workspace.arguments(job)["max_steps"] for job in jobs] == [30, 30]  # 200 = 80 + 30 * 4
    write_json({"steps": times, "heads": {"tr": 0.0, "dap": 199.0}}, workspace.timing)
    with pytest.raises(ValueError, match="dap: its heads cost 199 s, but tr 200 s in all"):
        workspace.arguments(jobs[0])
    assert step_cost.compared(workspace).keys() == {"tr", "dap"}


def test_only_runs_that_share_their_batches_are_timed(study: Callable[..., Workspace]) -> None:
    train = {"learning_rate": 0.5, "max_steps": 100, "train_data": "d"}
    sized, mixed = {"total_train_batch_size": 8}, {"language_mix": "uniform"}
    lacking, unlike = (
        "dap has no total_train_batch_size",
        "dap has language_mix='uniform', tr 'natural'",
    )
    for more, own, message in (({}, {}, lacking), (sized, mixed, unlike)):
        runs = {"tr": None, "dap": own, "same": {"like": "tr", "same_time_as": "dap"}}
        workspace = study(train=train | more, runs=runs)
        with pytest.raises(ValueError, match=message):
            step_cost.shared_arguments(step_cost.compared(workspace))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"steps": 3}, "unknown key steps; a recipe has name, places"),
        ({"train": {"train_data": "{text}/train"}}, r"'\{text\}/train' needs --places text="),
        ({"train": {"train_data": "{model}"}}, "needs --places model="),
        ({"evaluate": {"e": "x.py {model} {text}"}}, "needs --places text="),
        ({"evaluate": {"e": "x.py {"}}, "has a single brace"),
        ({"runs": {"a": {"evaluate": ["f"]}}}, "a evaluates f, which the recipe does not define"),
        ({"runs": {"a": {"like": "b"}, "b": None}}, "a is like b, which must be a run above it"),
        (
            {"runs": {"a": None, "b": {"same_time_as": "a"}}},
            "b is same_time_as a, which needs like",
        ),
        ({"runs": {"a": None, "b": {"like": "a", "same_time_as": "a"}}}, "which needs max_steps"),
        ({"learning_rates": []}, "a has no learning_rate"),
        ({"runs": {"a": {"model": "m", "max_steps": 3}}}, "a names a model.*leave max_steps out"),
        ({"runs": []}, "no recipe"),
    ],
)
def test_mistakes_in_a_recipe_are_named(content: dict, message: str, tmp_path: Path) -> None:
    path = tell(tmp_path, **{"learning_rates": [1.0], "runs": {"a": None}, **content})
    with pytest.raises(SystemExit, match=f"^error: .*recipe.yaml: .*{message}"):
        runner.main([str(path)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--places data", "--places data: give NAME=PATH"),
        ("--places model=m", "--places model=...: each run fills that in itself"),
        ("--only b", "--only b: .*recipe.yaml has a"),
    ],
)
def test_mistakes_in_the_command_are_named(arguments: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"^error: {message}"):
        runner.main(
            [str(tell(tmp_path, learning_rates=[1.0], runs={"a": None})), *arguments.split()]
        )


def test_what_fails_is_named_what_is_held_is_left_and_the_others_go_on(
    study: Callable[..., Workspace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {
        "bad": {"command": "json.tool", "objective": "t r"},
        "damaged": None,
        "held": None,
        "good": None,
    }
    runs["old"] = {"past": True, "an_argument_that_is_gone": 3}
    workspace = study(runs=runs)
    bad, damaged, held, good, _ = (job_of(workspace, name) for name in runs)
    for job in (damaged, held, good):
        finish(workspace.folder(job))
    (workspace.folder(damaged) / FINISHED).write_text("")
    log = workspace.folder(bad) / "train.log"
    held_folder = workspace.folder(held)
    with claimed(held_folder.with_name(f"{held_folder.name}.job")):
        of_the_command, of_the_folder = sorted(work(workspace, None))
    assert of_the_command == f"{bad.name}: json.tool ended with status 2: see {log}"
    assert "-m json.tool --learning_rate 1.0 --objective 't r' --seed 0" in log.read_text()
    assert of_the_folder.startswith(
        f"{damaged.name}: {workspace.folder(damaged) / FINISHED}: not valid JSON"
    )
    options = {
        "--output_dir": workspace.runs_dir,
        "--results_dir": workspace.results_dir,
        "--only": "bad",
    }
    argv = [str(part) for option in options.items() for part in option]
    runner.main([str(tmp_path / "recipe.yaml"), "--list", *argv, "held", "good", "old"])
    assert capsys.readouterr().out.splitlines() == [
        f"{bad.name}: begun", f"{held.name}: not collected", f"{good.name}: done"
    ]  # fmt: skip


def test_what_began_is_told_anew_but_for_a_checkpoint(study: Callable[..., Workspace]) -> None:
    workspace = study(runs={"a": None})
    job = job_of(workspace, "a")
    workspace.begin(job, {"max_steps": 1})
    workspace.begin(
        job, {"max_steps": 2}
    )  # the first command failed before it had trained anything
    (workspace.folder(job) / "checkpoint-1").mkdir()
    workspace.begin(job, {"max_steps": 3})
    assert json.loads((workspace.folder(job) / BEGUN).read_text())["command"][-1] == "2"


def test_how_far_a_training_is(study: Callable[..., Workspace]) -> None:
    workspace = study(evaluate={"e": "x.py", "f": "x.py"}, runs={"a": None})
    job = job_of(workspace, "a", "e", "f")
    folder = workspace.folder(job)
    assert workspace.state(job) == "open"
    folder.mkdir(parents=True)
    assert workspace.state(job) == "begun"
    finish(folder)
    write_json({"mean": 3}, folder / "f" / "f.json")
    assert workspace.state(job) == "trained, without e"
    for mean in (4, 6):  # first, and evaluated anew
        write_json({"mean": mean}, folder / "e" / "e.json")
        assert workspace.state(job) == "not collected"
        workspace.carry_out(job)
        assert workspace.state(job) == "done"
        found = json.loads(workspace.result(job).read_text())
        assert found["evaluations"] == {"e": {"mean": mean}, "f": {"mean": 3}}
    finish(folder, accuracy=70.0)  # trained anew
    assert workspace.state(job) == "not collected"
    workspace.carry_out(job)
    found = json.loads(workspace.result(job).read_text())
    assert (found["commit"], found["dev"]) == ("abc", {DEV: 70.0})


def test_a_ready_encoder_is_evaluated_without_training(
    study: Callable[..., Workspace],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    evaluate = {"e": "x.py --model {model} {pooling} {prefix} {revision} --output {result}"}
    runs = {"e5": {"model": "an/e5", "prefix": "query: ", "pooling": "mean"}, "tr": None}
    workspace = study(evaluate=evaluate, runs=runs, seeds=[0, 1])
    ran: list[list[str]] = []

    def execute_here(arguments: Sequence[str], log: Path, launcher: Sequence[str] = ()) -> None:
        ran.append([*arguments])
        write_json({"mean": 3}, Path(arguments[-1]))

    monkeypatch.setattr(runner, "execute", execute_here)
    (job,) = workspace.jobs(workspace.recipe.runs["e5"])
    assert workspace.state(job) == "open"
    assert work(workspace, ["e5"]) == []
    assert work(workspace, ["e5"]) == []
    result = str(workspace.folder(job) / "e" / "e.json")
    options = ["--pooling", "mean", "--prefix", "query: "]
    assert ran == [["x.py", "--model", "an/e5", *options, "--output", result]]
    assert workspace.state(job) == "done"
    found = json.loads(workspace.result(job).read_text())
    assert (found["command"], found["evaluations"]) == (None, {"e": {"mean": 3}})

    runner.dry_run(workspace, None)
    printed = capsys.readouterr().out
    assert "# e5-lr0/seed-0: done, evaluation of an/e5" in printed
    assert printed.count("train_dap.py") == 2
    trained = workspace.evaluation_command(job_of(workspace, "tr"), "e")
    assert trained[1:3] == ["--model", str(workspace.folder(job_of(workspace, "tr")))]
    assert trained[3] == "--output"


def test_a_dry_run_starts_no_training_and_prints_how_modules_are_run(
    study: Callable[..., Workspace], capsys: pytest.CaptureFixture[str]
) -> None:
    train = {"learning_rate": 1.0, "max_steps": 5, "total_train_batch_size": 8}
    runs = {"timed-0.5": {"seconds": 9}, "own": {"command": "experiments.control_shuffled"}}
    workspace = study(train=train, runs=runs)
    runner.dry_run(workspace, None)
    printed = capsys.readouterr().out
    assert "# timed-0.5-lr1/seed-0: open, steps not known yet: a short training" in printed
    assert "\npython -m experiments.control_shuffled --learning_rate 1.0" in printed
    assert not workspace.runs_dir.exists()
    assert workspace.probe(workspace.recipe.runs["timed-0.5"], ".json").name.startswith("timed-0.5")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_checkout_itself(tmp_path: Path) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for line in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "m"]):
        subprocess.run(["git", *line], cwd=tmp_path, check=True)
    (tmp_path / "copy").mkdir()
    (tmp_path / "results.json").write_text("{}")
    assert len(commit(tmp_path)) == 40
    (tmp_path / "other.py").write_text("1")
    assert commit(tmp_path).endswith("-dirty")
    assert commit(tmp_path / "copy") is None
    shutil.rmtree(tmp_path / ".git")
    assert commit(tmp_path) is None


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "experiments" / "recipes").glob("*.yaml")), ids=lambda p: p.stem
)
def test_the_projects_recipes_give_arguments_that_commands_take(path: Path, tmp_path: Path) -> None:
    heads = [
        f"{name}heads" for name in ("", "bow_", "longer_bow_", "longest_bow_", "tlm_", "both_")
    ]
    places = dict.fromkeys(
        ["encoder", "encoder_without_head", "data", "links", "shape", *heads], str(tmp_path)
    )
    recipe = read_recipe(path, places)
    assert recipe.name == path.stem
    for run in recipe.runs.values():
        if run.is_past or run.model is not None:
            continue
        model, _, _ = parse_arguments(
            flags(run.arguments | {"output_dir": str(tmp_path), "use_cpu": True})
        )
        fields = given_fields(model) | {"mask_token_id": 4}
        if "rtl_direction" in fields:
            fields["rtl_languages"] = ["de"]  # the text's
        DAPConfig(BertConfig(num_hidden_layers=4), **fields)


def test_the_script_for_a_gpu_goes_on_where_it_was(tmp_path: Path) -> None:
    python = tmp_path / "python"  # writes down what it is asked to run, and says how far a study is
    python.write_text(f"""#!/bin/sh
[ "$1" = -c ] || echo "$@" >> {tmp_path}/asked
case "$*" in *--list) cat {tmp_path}/progress;; esac
""")
    python.chmod(0o755)
    places = {"SHAPE": ".", "DATA": ".", "FOLDER": "study"}
    environment = os.environ | places | {"PYTHON": str(python)}
    script = ["bash", str(REPOSITORY / "experiments" / "gpu.sh")]
    for progress in ("tr: open\n", "tr: done\ndap: begun\n", "tr: done\n"):
        (tmp_path / "progress").write_text(progress)
        done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True)
        is_done = progress == "tr: done\n"
        assert ("all is done" in done.stdout) is is_done
        assert done.returncode == (0 if is_done else 1)
    assert (tmp_path / "study" / "results.tar.xz").is_file()
    studies = (tmp_path / "asked").read_text().splitlines()
    assert len(studies) == 6
    encoder = f" encoder={tmp_path}/study/runs/gpu/mlm-lr0.0005/seed-0 "
    assert all(encoder in line for line in studies)
