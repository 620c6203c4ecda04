"""The command against a Hub on loopback: what arrives, what errors say, and that no token leaks."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, save, synthetic_pairs
from hub_server import Fault, HubServer, Repo, serve
from huggingface_hub import ModelCard, SpaceCard
from tiny_models import tiny_model
from transformers import PreTrainedTokenizerFast
from written import text_of

from dap_transformers.commands import push as push_to_hub
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.files import write_json
from dap_transformers.reports import merge_seeds, report

TOKEN = "hf_dapSecretTokenOfTheTest"
SENTENCES = ["kaban loder", "mifin", "nabder kaban pugol rasut"]
#: Repository -> what goes wrong with it, and words of the error message (None: no error).
FAULTS = {
    "user/cut-once": (Fault("lfs", times=1), None),
    "user/cut": (Fault("lfs"), "push again: files that have arrived are not sent twice"),
    "user/no-token": (Fault("create", 401, "Invalid credentials: {token}"), "hf auth login"),
    "user/down": (Fault("commit", 503, "Service Unavailable"), "503 Service Unavailable"),
    "user/lossy": (Fault("loss"), "lacks"),
    "user/unchecked": (Fault("check", 403, "Forbidden"), "could not be checked"),
    "user/hidden": (Fault("info", 403, "not with {token}"), "not with Bearer ***"),
}
PUBLIC = "already exists and is public"
FAULT_OF_RUN = Fault("commit", 503, "Service Unavailable")
# Runs scripts, each in its own process and folder and with an empty cache. They run in a new
# Python, because the Hub's client reads its settings when it is imported.
PLAYER = """
import gc, json, multiprocessing, os, sys
import sentence_transformers, transformers.trainer
gc.freeze()  # otherwise each training's garbage collection visits all imported modules

def play(script, folder, arguments):
    os.mkdir(folder)
    os.chdir(folder)
    sys.argv = ["-c", *arguments]
    try:
        exec(script, {"__name__": "__main__"})
    finally:
        os.rename(os.environ["HF_HOME"], "hf")

for job in json.loads(sys.argv[1]):
    process = multiprocessing.get_context("fork").Process(target=play, args=job)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(process.exitcode)
"""
# Pushes. The client waits for seconds before a retry. Here it waits for milliseconds.
PUSHER = """
import json, os, re, sys, time
wait = time.sleep
time.sleep = lambda seconds: wait(min(seconds, 0.01))
from pathlib import Path
import numpy as np
import push_to_hub
import train_dap
from dap_transformers.publishing.hub import fetch_checkpoint, upload
from dap_transformers.publishing.layout import Options, publish
from huggingface_hub import ModelCard
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForPreTraining
from dap_transformers.encoding.encoder import SentenceEncoder

checkpoint, results, sentences = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
flags = ["--with_heads", "--results", results]
done = {"user/whole": push_to_hub.run([checkpoint, "--repo_id", "user/whole", *flags])}
encoder = SentenceEncoder.from_pretrained("user/whole")
vectors, done["revision"] = {"encoder": encoder.encode(sentences)}, encoder.revision
vectors["library"] = SentenceTransformer("user/whole", device="cpu").encode(sentences)
commit = done["user/whole"]["commit"]
vectors["pinned"] = SentenceEncoder.from_pretrained("user/whole", revision=commit).encode(sentences)
np.savez("vectors.npz", **vectors)
card = ModelCard.load("user/whole")
card.validate()
done["snippets"] = []
for snippet in re.findall(r"```python\\n(.*?)```", str(card), re.DOTALL):
    names = {}
    exec(snippet, names)
    has_vectors = "vectors" in names
    found = np.asarray(names["vectors"]).tolist() if has_vectors else str(type(names["model"]))
    done["snippets"].append(found)
done["local code"] = []
for auto in (AutoModelForPreTraining, AutoModel):
    model = auto.from_pretrained("user/whole", subfolder="pretraining")
    done["local code"].append(type(model).__module__)
push_to_hub.run([checkpoint, "--repo_id", "user/root", "--layout", "dap"])
model = AutoModelForPreTraining.from_pretrained(checkpoint)
model.save_pretrained("saved", push_to_hub=True, repo_id="user/saved")
# as train_dap.py does at its end
publish(checkpoint, "user/trained", Options(with_heads=True), private=True)
again = [checkpoint, "--repo_id", "user/again", "--space", "--output_dir", "written"]
done["user/again"] = push_to_hub.run(again)
for repo in ["user/secret", "user/public", *sys.argv[4:]]:
    try:
        done[repo] = upload(Path("written"), repo, private=repo in ("user/secret", "user/public"))
    except ValueError as error:
        done[repo] = {"error": str(error)}
done["user/copy"] = push_to_hub.run(["user/whole", "--repo_id", "user/copy", "--revision", commit])
try:
    push_to_hub.main([checkpoint, "--repo_id", "user/no-token"])
except SystemExit as end:
    done["exit"] = end.code
try:
    fetch_checkpoint("user/hidden")
except ValueError as error:
    done["fetch"] = str(error)
token = os.environ.pop("HF_TOKEN")
text = str(Path(checkpoint).with_name("de-en.tsv"))
run = ["--model_name_or_path", "user/whole", "--train_data", text, "--push_to_hub"]
run += "--per_device_train_batch_size 8 --dev_pairs 9 --max_steps 2 --save_steps 1".split()
run += ["--head_steps", "0", "--report_to", "none"]
for repo, given in (("user/run", token), ("user/run-late", token), ("user/run-wrong", "hf_wrong")):
    try:
        own = ["--output_dir", repo, "--hub_model_id", repo, "--hub_token", given]
        train_dap.main([*run, *own])
    except SystemExit as end:
        done[repo] = end.code
json.dump(done, open("done.json", "w"))
"""
# Loads what was pushed in a process that cannot import this project.
STRANGER = """
import sys
def is_ours(name):
    top = name.split(".")[0]
    return top == "dap" or top.endswith("_dap")
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if is_ours(name):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
import json, numpy as np, torch
from transformers import AutoModel, AutoModelForPreTraining, AutoTokenizer
sentences = json.loads(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained("user/whole")
batch = tokenizer(sentences, padding=True, return_tensors="pt")
plain = AutoModel.from_pretrained("user/whole")
code = {"subfolder": "pretraining", "trust_remote_code": True}
full = AutoModelForPreTraining.from_pretrained("user/whole", **code)
encoder = AutoModel.from_pretrained("user/whole", **code)
within = AutoTokenizer.from_pretrained("user/whole", subfolder="pretraining")
again = within(sentences, padding=True)
root = AutoModel.from_pretrained("user/root", trust_remote_code=True)
other = AutoTokenizer.from_pretrained("user/root")(sentences, padding=True)
assert again["input_ids"] == other["input_ids"] == batch["input_ids"].tolist()
with torch.no_grad():
    out = plain(**batch)
    own = batch["input_ids"], batch["attention_mask"]
    pooled = [model(*own).pooler_output for model in (encoder, root)]
again = [out.pooler_output, AutoModel.from_pretrained("user/whole")(**batch).pooler_output]
assert torch.equal(*again), "random weights"
assert torch.cosine_similarity(again[0].double(), pooled[0].double()).min() > 1 - 1e-6
np.savez(sys.argv[2], plain=out.last_hidden_state[:, 0], encoder=pooled[0], root=pooled[1])
assert type(plain).__module__ == "transformers.models.bert.modeling_bert", type(plain)
assert type(full).__module__.startswith("transformers_modules."), type(full)
assert full.rtl_head is not None
assert not any(map(is_ours, sys.modules))
"""


@dataclass
class Played:
    """What the processes did: results by repository, printed text, folders, state of the server."""

    folder: Path
    checkpoint: Path
    server: HubServer
    done: dict[str, Any] = field(default_factory=dict)
    printed: str = ""

    def run(self, *jobs: tuple[str, str, list[str]]) -> None:
        """Run scripts: tuples of the code, a new folder and the arguments."""
        blank = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "PYTHON"))
        }
        own = {"HF_ENDPOINT": self.server.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
        own |= {"HF_HOME": str(self.folder / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-I", "-c", PLAYER, json.dumps(jobs)]
        done = subprocess.run(
            command, env=blank | own, cwd=self.folder, capture_output=True, text=True
        )
        self.printed += done.stdout + done.stderr
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    torch.manual_seed(0)
    save(folder / "dap", tiny_model(), tiny_tokenizer)
    (folder / "de-en.tsv").write_bytes(text_of(synthetic_pairs("de", 60)))
    languages = {"languages": {"de": {"pairs": 3, "xx-en": 66.6667, "en-xx": 100.0}}}
    settings = {"pooling": "cls", "prefix": "", "data": ["/somewhere/tatoeba"]}
    write_json(
        report(str(folder / "dap"), "retrieval", languages, settings, 1.0), folder / "results.json"
    )
    return folder


@pytest.mark.slow
def test_pushes_arrive_whole_and_errors_say_what_to_do(folder: Path) -> None:
    """Check everything in one test, because the pushes take long and should run only once."""
    with serve(TOKEN) as server:
        server.faults = {repo: fault for repo, (fault, _) in FAULTS.items()} | {
            "user/run-late": FAULT_OF_RUN
        }
        server.repos["user/public"] = Repo()
        left = ("pretraining/model.safetensors", "special_tokens_map.json", "pytorch_model.bin")
        left = dict.fromkeys((*left, "model-00001-of-00002.safetensors"), b"old")
        server.repos["user/again"] = Repo(files=left | {"NOTES.md": b"mine"})
        played = Played(folder, folder / "dap", server)
        script = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n" + PUSHER
        arguments = [
            str(folder / "dap"),
            str(folder / "results.json"),
            json.dumps(SENTENCES),
            *FAULTS,
        ]
        strangers = [json.dumps(SENTENCES), str(folder / "stranger.npz")]
        played.run((script, "pusher", arguments), (STRANGER, "elsewhere", strangers))
        played.done = json.loads((folder / "pusher/done.json").read_text())
    check_vectors(played)
    check_snippets(played)
    assert played.done["local code"] == [
        "modeling_dap",
        "modeling_dap",
    ]
    # As `save_pretrained` pushes, too: without this file sentence-transformers would average.
    assert "modules.json" in server.repos["user/saved"].files
    check_existing_repository(played)
    check_connection_cut_once(played)
    for repo, said in [
        ("user/public", PUBLIC),
        *((repo, said) for repo, (_, said) in FAULTS.items() if said),
    ]:
        check_error(played, repo, said)
    check_private_and_copied(played)
    check_training(played)
    check_token(played)


def check_vectors(played: Played) -> None:
    expected = SentenceEncoder.from_pretrained(str(played.checkpoint)).encode(SENTENCES)
    for file in ("pusher/vectors.npz", "stranger.npz"):
        for name, vectors in np.load(played.folder / file).items():
            np.testing.assert_allclose(vectors, expected, atol=1e-5, err_msg=name)
    assert sorted(played.server.repos["user/whole"].files) == sorted(
        [*played.done["user/whole"]["files"]]
    )
    assert played.server.repos["user/whole"].commits == 1  # all or nothing
    assert played.done["revision"] == played.done["user/whole"]["commit"]
    assert "published as user/whole, commit" in played.printed


def check_snippets(played: Played) -> None:
    library, transformers, own, full = played.done["snippets"]
    np.testing.assert_allclose(library, own, atol=1e-5)
    pooled = np.array(transformers) * 1024  # pooler_output, slightly changed by tanh
    np.testing.assert_allclose(pooled, own, atol=1e-3)
    assert "DAPForPreTraining" in full
    assert played.server.count("validate", "") >= 1


def check_existing_repository(played: Played) -> None:
    repo = played.server.repos["user/again"]
    assert repo.commits == 1
    assert repo.files["NOTES.md"] == b"mine"
    assert set(repo.files) == {"NOTES.md", *played.done["user/again"]["files"]}
    assert b"old" not in repo.files.values()
    space = played.server.repos["space-of-user/again"]
    assert space.commits == 1
    assert {"app.py", "search.py", "requirements.txt", "modeling_dap.py"} <= set(space.files)


def check_connection_cut_once(played: Played) -> None:
    assert played.done["user/cut-once"] == played.server.repos["user/cut-once"].sha
    assert played.server.count("lfs", "user/cut-once") > played.server.count("lfs", "user/again")
    assert set(played.server.repos["user/cut-once"].files) == set(
        played.done["user/again"]["files"]
    )


def check_error(played: Played, repo: str, said: str) -> None:
    """A failed push ends in one line, and leaves nothing or the whole commit."""
    error = played.done[repo]["error"]
    assert error.startswith(repo)
    assert said in error
    assert "\n" not in error
    assert len(error) < 300
    held = played.server.repos.get(repo)
    if repo in ("user/lossy", "user/unchecked"):
        assert f"commit {held.sha[:8]}" in error
        assert held.commits == 1
    else:
        assert held is None or (held.commits == 0 and not held.files)


def check_private_and_copied(played: Played) -> None:
    assert played.done["exit"].startswith("error: user/no-token was not pushed: 401")
    assert "hf auth login" in played.done["exit"]
    assert played.server.repos["user/secret"].private
    assert played.server.repos["user/trained"].private
    trained = set(played.server.repos["user/trained"].files)
    assert trained == set(played.done["user/whole"]["files"])
    assert not played.server.repos["user/whole"].private
    copy = played.server.repos["user/copy"].files
    assert copy["model.safetensors"] == played.server.repos["user/whole"].files["model.safetensors"]
    assert copy["modules.json"] == played.server.repos["user/whole"].files["modules.json"]


def check_training(played: Played) -> None:
    """A run publishes only its end, without a pickle. If that fails, the model is still saved."""
    assert played.server.repos["user/run"].commits == 1
    files = set(played.server.repos["user/run"].files)
    assert files == {*played.done["user/whole"]["files"]}
    run = played.folder / "pusher/user/run"
    assert list(run.glob("checkpoint-*/optimizer.pt"))
    assert not list(run.rglob("training_args.bin"))
    card = ModelCard(played.server.repos["user/run"].files["README.md"].decode())
    assert card.data.base_model == "user/whole"
    assert "| optimizer steps | 2 |" in card.text
    assert "user/run" not in played.done
    assert played.done["user/run-wrong"].startswith("error: user/run-wrong was not pushed: 401 ")
    late = played.done["user/run-late"]
    assert late.startswith(
        "error: the training is finished and saved, but user/run-late was not pushed: 503"
    )
    assert late.endswith(
        "push it by push-to-hub user/run-late --repo_id user/run-late --with_heads"
    )
    assert "not with Bearer ***" in played.done["fetch"]


def check_token(played: Played) -> None:
    places = {str(path): path.read_bytes() for path in played.folder.rglob("*") if path.is_file()}
    for name, repo in played.server.repos.items():
        places |= {f"{name}/{path}": data for path, data in repo.files.items()}
    places |= {"printed": played.printed.encode(), "done": json.dumps(played.done).encode()}
    assert len(places) > 50
    assert not [name for name, data in places.items() if TOKEN.encode() in data]


def test_dry_run_writes_the_folder(
    folder: Path,
    capsys: pytest.CaptureFixture,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(push_to_hub, "upload", lambda *args: pytest.fail("something was sent"))
    arguments = [str(folder / "dap"), "--repo_id", "user/dry", "--dry_run", "--results"]
    written = push_to_hub.run([*arguments, str(folder / "results.json")])
    assert written["folder"] == f"{folder / 'dap'}-hub"
    assert "nothing was sent" in capsys.readouterr().out
    files = {
        path.relative_to(written["folder"]).as_posix()
        for path in Path(written["folder"]).rglob("*.*")
    }
    assert files == set(written["files"])
    with pytest.raises(ValueError, match="is not empty"):
        push_to_hub.run(arguments[:-1])
    assert not caplog.text
    other = json.loads((folder / "results.json").read_text()) | {"model": "some/other"}
    write_json(other, folder / "other.json")
    push_to_hub.run([*arguments, str(folder / "other.json"), "--output_dir", str(folder / "dry")])
    assert "other.json is about some/other" in caplog.text


def test_a_space_holds_all_code_that_it_imports(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [
        str(folder / "dap"),
        "--repo_id",
        "user/dry",
        "--dry_run",
        "--space",
        "--output_dir",
    ]
    push_to_hub.run([*arguments, str(tmp_path / "out")])
    space = tmp_path / "out-space"
    card = SpaceCard.load(space / "README.md")
    assert (card.data.sdk, card.data.app_file, card.data.models) == (
        "gradio",
        "app.py",
        ["user/dry"],
    )
    # Without these the Hub starts it with Python 3.10, which is too old.
    assert card.data.python_version == "3.11"
    assert re.fullmatch(r"\d+\.\d+\.\d+", card.data.sdk_version)
    imported = {
        name.split(".")[0]
        for file in space.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        )
    }
    own = {path.stem for path in REPOSITORY.glob("*.py")} | {"dap", "search", "examples"}
    assert (
        {"search", "dap", "modeling_dap"}
        <= imported & own
        <= {path.stem for path in space.iterdir()}
    )
    requirements = (space / "requirements.txt").read_text().splitlines()
    assert any(line.startswith("transformers") for line in requirements)
    started = []
    monkeypatch.setitem(sys.modules, "search", SimpleNamespace(main=started.append))
    for options in ([], ["--model", "out-hub"]):
        monkeypatch.setattr(sys, "argv", ["app.py", *options])
        exec((space / "app.py").read_text(), {})
    assert started == [["--model", "user/dry"], ["--model", "out-hub"]]
    with pytest.raises(ValueError, match="out-space is not empty"):
        push_to_hub.run([*arguments, str(tmp_path / "out")])


def test_merged_results_are_shown_and_the_current_folder_has_a_name(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "dap", folder / "named")
    made = json.loads((folder / "results.json").read_text())
    made["settings"]["recipe"] = "same"
    seeds = [
        made | {"model": str(folder / name), "seed": seed}
        for seed, name in ((1, "named"), (2, "named-seed2"))
    ]
    write_json(merge_seeds(seeds), folder / "merged.json")
    monkeypatch.chdir(folder / "named")
    written = push_to_hub.run(
        [".", "--repo_id", "user/dot", "--dry_run", "--results", str(folder / "merged.json")]
    )
    assert written["folder"] == f"{folder / 'named'}-hub"
    assert not caplog.text
    assert "66.67 ± 0.00" in Path(written["folder"], "README.md").read_text()


def test_missing_onnx_packages_are_noticed_before_anything_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # as if it was not installed
    out = folder / "with-onnx"
    with pytest.raises(ValueError, match="--onnx: .*pip install onnx"):
        push_to_hub.run(
            [
                str(folder / "dap"),
                "--repo_id",
                "user/a",
                "--dry_run",
                "--onnx",
                "--output_dir",
                str(out),
            ]
        )
    assert not out.exists()


def test_a_push_without_network_says_why(folder: Path) -> None:
    with pytest.raises(ValueError, match="user/dap was not pushed: HF_HUB_OFFLINE is set"):
        push_to_hub.run([str(folder / "dap"), "--repo_id", "user/dap"])
    with pytest.raises(ValueError, match="no/such-model is not a folder, and cannot be downloaded"):
        push_to_hub.run(["no/such-model", "--repo_id", "user/dap", "--revision", "main"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--repo_id", "user/a b"], "user/a b"),
        (["--repo_id", "mine"], "add the account, as in user/mine"),
        (["--repo_id", "user/a", "--with_heads", "--layout", "dap"], "leave --with_heads out"),
        (["--repo_id", "user/a", "--dry_run", "--private"], "--private has no effect"),
        (["--repo_id", "user/a", "--results", "absent.json"], "absent.json"),
    ],
)
def test_arguments_that_do_not_fit_end_in_one_line(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(SystemExit, match=message) as end:
        push_to_hub.main(["out", *flags])
    assert str(end.value).startswith("error: ")
