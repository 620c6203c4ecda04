"""The command against a Hub in the client's cache: what arrives, and errors. No token leaks."""

import hashlib
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from conftest import load_encoder, load_library, save, synthetic_pairs
from forked import run_fresh
from huggingface_hub import HfApi, ModelCard, RepoUrl, get_token
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HfHubHTTPError
from tiny_models import tiny_model
from transformers import AutoModelForPreTraining
from written import contents, text_of, write

import train_dap
from dap_transformers.commands import push_to_hub
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.files import read_json, write_json
from dap_transformers.publishing.publish import publish
from dap_transformers.reports import report

TOKEN = "hf_dapSecretTokenOfTheTest"
SENTENCES = ["kaban loder", "mifin", "nabder kaban pugol rasut"]
# Loads what was pushed, in a process that does not import this project.
STRANGER = """
import json, sys, torch
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
    print(json.dumps([plain(**batch).last_hidden_state[:, 0].tolist(), pooled.tolist()]))
"""


class Hub:
    """What the Hub's client sends, kept in its cache, from which models load without a network.

    Its methods stand for those of `HfApi`.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = defaultdict(dict)  # of the last commit
        self.is_private: dict[str, bool] = {}
        self.commits = Counter()
        self.faults: dict[str, int] = {}  # repository -> status of the answer to a commit

    def commit(self, repo_id: str, files: dict[str, bytes]) -> str:
        self.files[repo_id] = files
        self.commits[repo_id] += 1
        sha = hashlib.sha1(f"{repo_id} {self.commits[repo_id]}".encode()).hexdigest()
        place = Path(HF_HUB_CACHE, f"models--{repo_id.replace('/', '--')}")
        for name, data in files.items():
            write(place / "snapshots" / sha / name, data)
        write(place / "refs/main", sha)
        return sha

    def create_repo(self, repo_id: str, private: bool | None = None, **_: object) -> RepoUrl:
        if get_token() != TOKEN:
            raise refused(401)
        self.is_private.setdefault(repo_id, bool(private))
        return RepoUrl(f"https://huggingface.co/{repo_id}")

    def repo_info(self, repo_id: str) -> SimpleNamespace:
        return SimpleNamespace(private=self.is_private[repo_id])

    def list_repo_files(self, repo_id: str, **_: object) -> list[str]:
        return [*self.files[repo_id]]

    def create_commit(self, repo_id: str, operations: Iterable, **_: object) -> SimpleNamespace:
        if repo_id in self.faults:
            raise refused(self.faults[repo_id])
        files = self.files[repo_id].copy()
        for each in operations:
            if hasattr(each, "as_file"):
                with each.as_file() as file:
                    files[each.path_in_repo] = file.read()
            else:
                del files[each.path_in_repo]
        return SimpleNamespace(oid=self.commit(repo_id, files))


def refused(status: int) -> HfHubHTTPError:
    request = httpx.Request("POST", "https://huggingface.co")
    response = httpx.Response(status, request=request)
    return HfHubHTTPError(f"status {status}\nof the Hub", response=response)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    for name in ("create_repo", "repo_info", "list_repo_files", "create_commit"):
        monkeypatch.setattr(HfApi, name, staticmethod(getattr(hub, name)))
    monkeypatch.setattr(HfApi, "_validate_yaml", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.hf_api.is_xet_available", lambda: False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    torch.manual_seed(0)
    save(folder / "dap", tiny_model())
    (folder / "de-en.tsv").write_bytes(text_of(synthetic_pairs("de", 60)))
    metric = {"data": "tatoeba", "place": "de", "name": "accuracy xx→en", "value": 66.6667}
    numbers = {"metrics": [{"task": "bitext retrieval", "kind": "accuracy"} | metric]}
    settings = {"pooling": "cls", "prefix": ""}
    made = report(str(folder / "dap"), "retrieval", numbers, settings, 1.0)
    write_json(made, folder / "results.json")
    return folder


def pushed(source: Path | str, name: str, *flags: str) -> str:
    """Return the commit or the error."""
    try:
        return push_to_hub.run([str(source), "--repo_id", f"user/{name}", *flags])
    except ValueError as error:
        return str(error)


@pytest.mark.slow
def test_a_push_arrives_whole_and_loads_without_our_code(folder: Path, hub: Hub) -> None:
    left = ("pretraining/model.safetensors", "special_tokens_map.json", "pytorch_model.bin")
    hub.commit("user/again", dict.fromkeys(left, b"old") | {"NOTES.md": b"mine"})
    results = ("--results", str(folder / "results.json"))
    commit = pushed(folder / "dap", "whole", "--with_heads", *results)
    pushed(folder / "dap", "again")
    pushed(folder / "dap", "secret", "--private")
    pushed("user/whole", "copy", "--revision", commit)
    AutoModelForPreTraining.from_pretrained(folder / "dap").push_to_hub("user/saved")

    whole, copy, again = (hub.files[f"user/{name}"] for name in ("whole", "copy", "again"))
    assert (hub.commits["user/whole"], hub.is_private["user/whole"]) == (1, False)  # all or nothing
    assert {"pretraining/model.safetensors", "modeling_dap.py"} <= whole.keys()
    plain = {name for name in whole if "/" not in name and not name.endswith(".py")}
    assert {name for name in again if "/" not in name} == plain | {"NOTES.md"}
    assert b"old" not in again.values()
    # As `push_to_hub` of a model, too: without this file sentence-transformers would average.
    assert "modules.json" in hub.files["user/saved"]
    assert hub.is_private["user/secret"]
    for name in ("model.safetensors", "modules.json"):
        assert copy[name] == whole[name]

    expected = load_encoder(folder / "dap").encode(SENTENCES)
    pinned = SentenceEncoder.from_pretrained("user/whole", revision=commit)
    loaded = (load_encoder("user/whole"), load_library("user/whole"), pinned)
    found = [each.encode(SENTENCES) for each in loaded]
    stranger = [sys.executable, "-I", "-c", STRANGER, json.dumps(SENTENCES)]
    found += json.loads(run_fresh(*stranger, cwd=folder))
    for each in found:
        np.testing.assert_allclose(each, expected, atol=1e-5)


@pytest.mark.slow
def test_a_failed_push_ends_in_one_line_and_leaves_nothing(
    folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.is_private["user/public"] = False
    hub.faults["user/down"] = 503
    errors = {
        "is public": pushed(folder / "dap", "public", "--private"),
        "was not pushed: .*503": pushed(folder / "dap", "down"),
        "user/absent is no folder, and cannot be fetched": pushed("user/absent", "nothing"),
    }
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    errors["was not pushed: .*401"] = pushed(folder / "dap", "no-token")
    for says, error in errors.items():
        assert re.search(says, error)
        assert "\n" not in error
    assert not hub.commits


@pytest.mark.slow
def test_a_training_publishes_its_end_without_pickles_and_keeps_the_model_if_that_fails(
    folder: Path, hub: Hub, here: Path
) -> None:
    hub.commit("user/start", contents(folder / "dap"))
    hub.faults["user/late"] = 503

    def train(name: str, token: str) -> None:
        train_dap.main(
            f"--model_name_or_path user/start --train_data {folder}/de-en.tsv --output_dir {name} "
            f"--push_to_hub --hub_model_id user/{name} --hub_token {token} --max_steps 2 "
            "--per_device_train_batch_size 8 --dev_pairs 9 --save_steps 1 --head_steps 0 "
            "--report_to none".split()
        )

    train("run", TOKEN)
    files = hub.files["user/run"]
    assert hub.commits["user/run"] == 1
    assert {"model.safetensors", "modules.json", "tokenizer.json"} <= files.keys()
    assert not [name for name in files if name.endswith((".bin", ".pt"))]
    assert [*here.glob("run/checkpoint-*/optimizer.pt")]
    card = ModelCard(files["README.md"].decode())
    assert card.data.base_model == "user/start"
    assert "| optimizer steps | 2 |" in card.text
    with pytest.raises(SystemExit, match="finished and saved, but user/late was not pushed"):
        train("late", TOKEN)
    assert (here / "late/model.safetensors").is_file()
    with pytest.raises(SystemExit, match="401"):
        train("wrong", "hf_wrong")

    written = files | contents(here)
    assert not [name for name, data in written.items() if TOKEN.encode() in data]


def test_a_dry_run_writes_the_folder_and_sends_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / "dap")
    command = ". --repo_id user/dry --dry_run --results"
    assert push_to_hub.run(f"{command} ../results.json".split()) is None
    assert "66.67" in (folder / "dap-hub/README.md").read_text()
    assert not caplog.text
    other = read_json(folder / "results.json") | {"model": "some/other"}
    write_json(other, folder / "other.json")
    push_to_hub.run(f"{command} ../other.json --output_dir ../dry".split())
    assert "some/other" in caplog.text


def test_a_push_without_network_says_why(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"user/dap was not pushed: .*HF_HUB_OFFLINE"):
        publish(folder / "dap", "user/dap")
