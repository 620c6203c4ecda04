"""The command against a Hub on loopback: what arrives, what errors say, and that no token leaks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, load_encoder, save, synthetic_pairs
from hub_server import HubServer, Repo, serve
from huggingface_hub import ModelCard
from tiny_models import tiny_model
from written import text_of

from dap_transformers.commands import push_to_hub
from dap_transformers.files import read_json, write_json
from dap_transformers.publishing.publish import publish
from dap_transformers.reports import report

TOKEN = "hf_dapSecretTokenOfTheTest"
SENTENCES = ["kaban loder", "mifin", "nabder kaban pugol rasut"]
# Pushes, in a new Python, because the Hub's client reads its settings when it is imported.
PUSHER = """
import json, os, re, sys, time
wait = time.sleep
time.sleep = lambda seconds: wait(min(seconds, 0.01))  # the client waits before a retry
from pathlib import Path
import numpy as np
from dap_transformers.commands import push_to_hub
from dap_transformers.encoding.encoder import SentenceEncoder
import train_dap
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForPreTraining

folder, sentences = Path(sys.argv[1]), json.loads(sys.argv[2])
checkpoint, results = str(folder / "dap"), str(folder / "results.json")

def pushed(source, name, *flags):
    try:
        return push_to_hub.run([source, "--repo_id", f"user/{name}", *flags])
    except ValueError as error:
        return str(error)

done = {"whole": pushed(checkpoint, "whole", "--with_heads", "--results", results)}
encoder = SentenceEncoder.from_pretrained("user/whole")
library = SentenceTransformer("user/whole", device="cpu")
pinned = SentenceEncoder.from_pretrained("user/whole", revision=done["whole"])
vectors = [each.encode(sentences).tolist() for each in (encoder, library, pinned)]
AutoModelForPreTraining.from_pretrained(checkpoint).push_to_hub("user/saved")
for name in ("again", "no-token", "down", "public", "secret"):
    done[name] = pushed(checkpoint, name, *["--private"] * (name in ("public", "secret")))
done["copy"] = pushed("user/whole", "copy", "--revision", done["whole"])
done["nothing"] = pushed("user/absent", "nothing")
token = os.environ.pop("HF_TOKEN")
run = ["--model_name_or_path", "user/whole", "--train_data", str(folder / "de-en.tsv")]
run += "--push_to_hub --per_device_train_batch_size 8 --dev_pairs 9 --max_steps 2".split()
run += "--save_steps 1 --head_steps 0 --report_to none".split()
for repo, given in (("run", token), ("run-late", token), ("run-wrong", "hf_wrong")):
    own = ["--output_dir", repo, "--hub_model_id", f"user/{repo}", "--hub_token", given]
    try:
        train_dap.main([*run, *own])
    except SystemExit as end:
        done[repo] = end.code
Path("done.json").write_text(json.dumps({"done": done, "vectors": vectors}))
"""
# Loads what was pushed, in a process that cannot import this project.
STRANGER = """
import json, sys, torch
from pathlib import Path
from transformers import AutoModel, AutoModelForPreTraining, AutoTokenizer
sentences = json.loads(sys.argv[1])
batch = AutoTokenizer.from_pretrained("user/whole")(sentences, padding=True, return_tensors="pt")
plain = AutoModel.from_pretrained("user/whole")
code = {"subfolder": "pretraining", "trust_remote_code": True}
encoder = AutoModel.from_pretrained("user/whole", **code)
full = AutoModelForPreTraining.from_pretrained("user/whole", **code)
assert full.rtl_head is not None
assert type(full).__module__.startswith("transformers_modules."), type(full)
assert not [name for name in sys.modules if name.split(".")[0] in ("dap_transformers", "heads_dap")]
with torch.no_grad():
    pooled = encoder(batch["input_ids"], batch["attention_mask"]).pooler_output
    vectors = [plain(**batch).last_hidden_state[:, 0].tolist(), pooled.tolist()]
Path("vectors.json").write_text(json.dumps(vectors))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    torch.manual_seed(0)
    save(folder / "dap", tiny_model())
    (folder / "de-en.tsv").write_bytes(text_of(synthetic_pairs("de", 60)))
    metric = {"name": "accuracy xx→en", "value": 66.6667, "place": "de", "kind": "accuracy"}
    numbers = {"metrics": [{"task": "bitext retrieval"} | metric]}
    settings = {"pooling": "cls", "prefix": "", "data": ["/somewhere/tatoeba"]}
    made = report(str(folder / "dap"), "retrieval", numbers, settings, 1.0)
    write_json(made, folder / "results.json")
    return folder


def play(server: HubServer, place: Path, script: str, *arguments: str) -> str:
    """Run a script in a new Python process with an empty cache, and return what it prints."""
    place.mkdir()
    own = {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HOME": str(place / "hf")}
    own |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-I", "-c", script, *arguments]
    done = subprocess.run(command, env=os.environ | own, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.slow
def test_pushes_arrive_whole_and_errors_say_what_happened(folder: Path) -> None:
    """Check everything in one test, because the pushes take long and should run only once."""
    left = ("pretraining/model.safetensors", "special_tokens_map.json", "pytorch_model.bin")
    with serve(TOKEN) as server:
        server.faults = {
            "user/no-token": ("commit", 401),
            "user/down": ("commit", 503),
            "user/run-late": ("commit", 503),
        }
        server.repos["user/public"] = Repo()
        server.repos["user/again"] = Repo(files=dict.fromkeys(left, b"old") | {"NOTES.md": b"mine"})
        own_path = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        sentences = json.dumps(SENTENCES)
        printed = play(server, folder / "pusher", own_path + PUSHER, str(folder), sentences)
        printed += play(server, folder / "stranger", STRANGER, sentences)
    found = read_json(folder / "pusher/done.json")
    expected = load_encoder(folder / "dap").encode(SENTENCES)
    for each in found["vectors"] + read_json(folder / "stranger/vectors.json"):
        np.testing.assert_allclose(each, expected, atol=1e-5)

    check_repositories(server.repos, found["done"])
    check_errors(server.repos, found["done"])
    check_training(server.repos, found["done"], folder / "pusher")
    places = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for name, repo in server.repos.items():
        places |= {f"{name}/{path}": data for path, data in repo.files.items()}
    places["printed"] = printed.encode()
    assert not [name for name, data in places.items() if TOKEN.encode() in data]


def check_repositories(repos: dict[str, Repo], done: dict) -> None:
    whole, again = repos["user/whole"], repos["user/again"]
    assert (whole.commits, whole.sha, whole.private) == (1, done["whole"], False)  # all or nothing
    assert {"pretraining/model.safetensors", "modeling_dap.py"} <= whole.files.keys()
    plain = {name for name in whole.files if "/" not in name and not name.endswith(".py")}
    assert {name for name in again.files if "/" not in name} == plain | {"NOTES.md"}
    assert b"old" not in again.files.values()
    # As `push_to_hub` of a model, too: without this file sentence-transformers would average.
    assert "modules.json" in repos["user/saved"].files
    assert repos["user/secret"].private
    for name in ("model.safetensors", "modules.json"):
        assert repos["user/copy"].files[name] == whole.files[name]


def check_errors(repos: dict[str, Repo], done: dict) -> None:
    """A failed push ends in one line, and leaves nothing."""
    for name, said in (
        ("no-token", "was not pushed: .*401"),
        ("down", "was not pushed: .*503"),
        ("public", "already exists and is public"),
        ("nothing", "user/absent is no folder, and cannot be fetched"),
    ):
        assert re.search(said, done[name])
        assert "\n" not in done[name]
        assert not repos.get(f"user/{name}", Repo()).files


def check_training(repos: dict[str, Repo], done: dict, place: Path) -> None:
    """A run publishes only its end, without a pickle. If that fails, the model is still saved."""
    assert repos["user/run"].commits == 1
    assert repos["user/run"].files.keys() == repos["user/whole"].files.keys()
    assert list(place.glob("run/checkpoint-*/optimizer.pt"))
    card = ModelCard(repos["user/run"].files["README.md"].decode())
    assert card.data.base_model == "user/whole"
    assert "| optimizer steps | 2 |" in card.text
    assert "run" not in done
    assert re.search("401", done["run-wrong"])
    assert re.search("finished and saved, but user/run-late was not pushed", done["run-late"])
    assert (place / "run-late/model.safetensors").is_file()


def test_a_dry_run_writes_the_folder_and_sends_nothing(
    folder: Path,
    capsys: pytest.CaptureFixture,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder / "dap")
    command = ". --repo_id user/dry --dry_run --results"
    assert push_to_hub.run(f"{command} ../results.json".split()) is None
    assert "nothing was sent" in capsys.readouterr().out
    assert "66.67" in (folder / "dap-hub/README.md").read_text()
    assert not caplog.text
    other = read_json(folder / "results.json") | {"model": "some/other"}
    write_json(other, folder / "other.json")
    push_to_hub.run(f"{command} ../other.json --output_dir ../dry".split())
    assert "some/other" in caplog.text


def test_a_push_without_network_says_why(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"user/dap was not pushed: .*HF_HUB_OFFLINE"):
        publish(folder / "dap", "user/dap")
    with pytest.raises(SystemExit, match="error: no/such-model is no folder, and cannot be"):
        push_to_hub.main(["no/such-model", "--repo_id", "user/dap", "--revision", "main"])
