"""Fetching from the Hub and pushing to it, with errors that say what to do and never hold the token."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, get_token, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from transformers.dynamic_module_utils import get_relative_import_files

import modeling_dap
from dap.errors import UserError, one_line
from dap.publishing.model_card import HEADS_FOLDER

#: What is never fetched from the Hub: pickles, and weights of other frameworks.
OTHER_WEIGHTS = (
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.pkl",
    "*.pickle",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.gguf",
)
#: What an earlier push may have left that would contradict the present one; its own files are never deleted.
STALE = (
    "model*.safetensors", "model.safetensors.index.json", "training_args.bin", f"{HEADS_FOLDER}/*",
    "modules.json", "sentence_bert_config.json", "1_Pooling/*", "2_Normalize/*", "onnx/*",
    "special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json", "merges.txt", "spm.model",
    "sentencepiece.bpe.model", "pytorch_model*.bin*", "run.json",
    "modeling_dap.py", *(Path(file).name for file in get_relative_import_files(modeling_dap.__file__)),
)  # fmt: skip
#: HTTP status of a refusal -> what to do.
ADVICE = {
    401: "the token is missing, wrong or expired: run `hf auth login`, or set HF_TOKEN",
    402: "the account has to pay for this: look at its billing page",
    403: "the token may not write there, or the account's storage is full: use a token with write access to {repo}, "
    "or free space",
    404: "no such account or organisation, or the token may not see it: check --repo_id {repo}",
    413: "a file is larger than the Hub takes, or the storage is full: free space",
    429: "too many requests: wait, and push again",
    507: "the storage is full: free space on the account of {repo}",
}


def fetch(checkpoint: str, revision: str | None = None) -> Path:
    """The checkpoint as a local folder: itself, or a download from the Hub without pickles.

    Raises:
        FileNotFoundError: neither a folder nor the id of a repository.
        ValueError: the Hub does not give it.
    """
    if Path(checkpoint).is_dir():
        return Path(checkpoint)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", checkpoint):
        raise FileNotFoundError(
            f"{checkpoint}: no such folder, and not the id of a Hub repository."
        )
    try:
        return Path(
            snapshot_download(checkpoint, revision=revision, ignore_patterns=list(OTHER_WEIGHTS))
        )
    except Exception as error:  # of answers that no Hub gives the client raises anything
        reason = without_token(one_line(error))
        raise UserError(
            f"{checkpoint} is neither a folder nor to be had from the Hub: {reason}"
        ) from None


def upload(
    folder: Path,
    repo_id: str,
    private: bool = False,
    revision: str | None = None,
    space: bool = False,
) -> str:
    """Push a folder as one commit, so that a repository has all of it or nothing; gives the commit's id.

    The client sends a file again after a cut connection. Afterwards the repository's files are compared with the
    folder's. The token is HF_TOKEN, or that of `hf auth login`; `revision` is a branch that is there; `space` makes it
    a Gradio Space, which may have the id of a model.

    Raises:
        ValueError: the Hub refuses or cannot be reached, a public repository is there although a private one is
            wanted, or files are missing after the commit. The message never holds the token.
    """
    api, kind = HfApi(), "space" if space else "model"
    with explained(repo_id):
        sdk = "gradio" if space else None
        api.create_repo(
            repo_id, private=private or None, repo_type=kind, exist_ok=True, space_sdk=sdk
        )
        found = api.repo_info(repo_id, repo_type=kind)
    if private and not found.private:
        raise UserError(
            f"{repo_id} is there and is public: make it private first, or leave --private out."
        )
    with explained(repo_id):
        commit = api.upload_folder(
            repo_id=repo_id,
            repo_type=kind,
            folder_path=folder,
            revision=revision,
            commit_message="Publish with dap-transformers",
            delete_patterns=list(STALE),
        )
    oid = one_line(commit.oid)
    with explained(
        repo_id, f"was pushed as commit {oid[:8]}, but what arrived could not be checked"
    ):
        tree = api.list_repo_tree(repo_id, recursive=True, revision=oid, repo_type=kind)
        there = {item.path: getattr(item, "size", None) for item in tree}
    here = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }
    if lacking := sorted(name for name, size in here.items() if there.get(name) != size):
        raise UserError(f"{repo_id} lacks {', '.join(lacking)} after commit {oid[:8]}: push again.")
    return oid


@contextmanager
def explained(repo_id: str, outcome: str = "was not pushed") -> Iterator[None]:
    """Turns what the Hub's client raises into a `ValueError` that says what to do; see `explain`."""
    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # the client warns in the server's words, as they come
            yield
    except Exception as error:  # of answers that no Hub gives the client raises anything
        raise UserError(explain(error, repo_id, outcome)) from None


def explain(error: BaseException, repo_id: str, outcome: str = "was not pushed") -> str:
    """One line on why a push failed and what to do; the token is blotted out should an error hold it."""
    text, status, link = "", 0, error
    while link is not None:
        if isinstance(link, OfflineModeIsEnabled):
            return f"{repo_id} {outcome}: HF_HUB_OFFLINE is set; unset it."
        if isinstance(link, HfHubHTTPError) and link.response is not None:
            status = link.response.status_code
            text = f"{status} {one_line(link.server_message or link.response.reason_phrase)}"
            break
        text = f"{type(link).__name__}: {one_line(link)}"  # the first cause says most
        link = link.__cause__
    if re.search(r"quota|storage limit", text.replace(repo_id, ""), re.IGNORECASE):
        status = 507
    retry = "push again; what has arrived is not sent twice"
    advice = "" if isinstance(error, ValueError) else retry
    if status >= 500:
        advice = f"the Hub has a problem: {retry}"
    advice = ADVICE.get(status, advice).format(repo=repo_id)
    return f"{repo_id} {outcome}: {without_token(text)}" + (f" ({advice})" if advice else "")


def without_token(text: str) -> str:
    """The text with the token that the Hub's client uses blotted out."""
    token = get_token()
    return text.replace(token, "***") if token else text
