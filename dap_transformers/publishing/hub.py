"""Fetch checkpoints from the Hub, and push folders to it.

Error messages say what to do, and never contain the token.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, get_token, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from transformers.dynamic_module_utils import get_relative_import_files

import modeling_dap
from dap_transformers.errors import UserError, one_line
from dap_transformers.publishing.card import HEADS_FOLDER

#: Files that are never fetched: pickles, and weights of other frameworks.
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
_CODE_FILES = [Path(file).name for file in get_relative_import_files(modeling_dap.__file__)]
#: Files of an earlier push that could contradict the new ones, and are deleted. Other files stay.
STALE = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model*.bin*",
    "training_args.bin",
    "run.json",
    f"{HEADS_FOLDER}/*",
    "onnx/*",
    # of sentence-transformers
    "modules.json",
    "sentence_bert_config.json",
    "1_Pooling/*",
    "2_Normalize/*",
    # of tokenizers
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spm.model",
    "sentencepiece.bpe.model",
    # our code
    "modeling_dap.py",
    *_CODE_FILES,
)
#: HTTP status -> what to do.
ADVICE = {
    401: "the token is missing, wrong or expired: run `hf auth login`, or set HF_TOKEN",
    402: "the account has to pay for this: look at its billing page",
    403: "the token may not write there, or the account's storage is full: use a token with write "
    "access to {repo}, or free space",
    404: "there is no such account or organisation, or the token may not see it: check --repo_id "
    "{repo}",
    413: "a file is larger than the Hub accepts, or the storage is full: free space",
    429: "too many requests: wait, and push again",
    507: "the storage is full: free space on the account of {repo}",
}
RETRY = "push again: files that have arrived are not sent twice"


def fetch_checkpoint(checkpoint: str, revision: str | None = None) -> Path:
    """Return a checkpoint as a local folder, and download it if it is on the Hub.

    A folder of this name on the disk comes first.

    Args:
        checkpoint: a folder, or the id of a Hub repository. Pickles, and weights other than
            safetensors, are not downloaded.
        revision: branch, tag or commit on the Hub. None: the main branch.

    Returns:
        The folder. A download lies in the cache of the Hub's client.
    """
    if Path(checkpoint).is_dir():
        return Path(checkpoint)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", checkpoint):
        raise FileNotFoundError(f"{checkpoint}: no such folder, and not the id of a Hub repository")
    try:
        ignored = list(OTHER_WEIGHTS)
        return Path(snapshot_download(checkpoint, revision=revision, ignore_patterns=ignored))
    except Exception as error:  # the Hub's client raises many kinds
        reason = without_token(one_line(error))
        raise UserError(
            f"{checkpoint} is not a folder, and cannot be downloaded from the Hub: {reason}"
        ) from None


def upload(
    folder: Path,
    repo_id: str,
    private: bool = False,
    revision: str | None = None,
    space: bool = False,
) -> str:
    """Push a folder as one commit, so that a repository has all of it or nothing.

    Files of an earlier push that could contradict the new ones (`STALE`) are deleted in this
    commit. Other files stay. The client repeats a transfer after a lost connection. After the
    commit, the repository's files are compared with the folder's. The token comes from HF_TOKEN
    or `hf auth login`.

    Args:
        folder: the folder to push.
        repo_id: id of the repository, which is created if it does not exist.
        private: whether the repository must be private. If False, an existing one stays as it is.
        revision: existing branch to push to. Default: main.
        space: whether to push to a Gradio Space instead of a model. It may have the same id.

    Returns:
        The id of the commit.
    """
    api = HfApi()
    kind = "space" if space else "model"
    with explained(repo_id):
        api.create_repo(
            repo_id,
            private=private or None,
            repo_type=kind,
            exist_ok=True,
            space_sdk="gradio" if space else None,
        )
        found = api.repo_info(repo_id, repo_type=kind)
    if private and not found.private:
        raise UserError(
            f"{repo_id} already exists and is public: make it private first, or leave --private out"
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

    outcome = f"was pushed as commit {oid[:8]}, but the pushed files could not be checked"
    with explained(repo_id, outcome):
        tree = api.list_repo_tree(repo_id, recursive=True, revision=oid, repo_type=kind)
        pushed = {item.path: getattr(item, "size", None) for item in tree}
    missing = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and pushed.get(name) != path.stat().st_size:
            missing.append(name)
    if missing:
        raise UserError(f"{repo_id} lacks {', '.join(missing)} after commit {oid[:8]}: push again")
    return oid


@contextmanager
def explained(repo_id: str, outcome: str = "was not pushed") -> Iterator[None]:
    """Turn any error within the block into a one-line `UserError` that says what to do.

    This is a context manager. Warnings within the block are hidden, because they repeat the error.

    Args:
        repo_id: id of the repository that the block talks to.
        outcome: what did not happen because of an error, for the message.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # the client repeats the server's words
            yield
    except Exception as error:  # the Hub's client raises many kinds
        raise UserError(explain(error, repo_id, outcome)) from None


def explain(error: BaseException, repo_id: str, outcome: str = "was not pushed") -> str:
    """Return a message of one line that says why a push failed and what to do.

    Args:
        error: the error of the Hub's client. If other errors caused it, the first cause is
            explained.
        repo_id: id of the repository.
        outcome: what did not happen because of the error.

    Returns:
        The message. It never contains the token.
    """
    reason = ""
    status = 0
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OfflineModeIsEnabled):
            return f"{repo_id} {outcome}: HF_HUB_OFFLINE is set, unset it"
        if isinstance(link, HfHubHTTPError) and link.response is not None:
            status = link.response.status_code
            words = link.server_message or link.response.reason_phrase
            reason = f"{status} {one_line(words)}"
            break
        reason = f"{type(link).__name__}: {one_line(link)}"
        link = link.__cause__  # the first cause says most

    if re.search(r"quota|storage limit", reason.replace(repo_id, ""), re.IGNORECASE):
        status = 507
    advice = "" if isinstance(error, ValueError) else RETRY
    if status >= 500:
        advice = f"the Hub has a problem: {RETRY}"
    advice = ADVICE.get(status, advice).format(repo=repo_id)
    message = f"{repo_id} {outcome}: {without_token(reason)}"
    return f"{message} ({advice})" if advice else message


def without_token(text: str) -> str:
    """Replace the user's Hub token in a text by asterisks, if there is a token."""
    token = get_token()
    return text.replace(token, "***") if token else text
