"""Fetch checkpoints from the Hub, and push folders to it."""

from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from transformers.dynamic_module_utils import get_relative_import_files

import modeling_dap
from dap_transformers.errors import UserError, reading
from dap_transformers.publishing.layout import HEADS_FOLDER

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
    "*_Normalize/*",
    "*_Dense/*",
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


def fetch_checkpoint(checkpoint: str | Path, revision: str | None) -> Path:
    """Return a checkpoint as a local folder, and download it to the cache if it is on the Hub.

    A folder of this name on the disk comes first. Pickles, and weights other than safetensors, are
    not downloaded.
    """
    if Path(checkpoint).is_dir():
        return Path(checkpoint)
    with reading(f"{checkpoint} is no folder, and cannot be fetched from the Hub"):
        ignored = list(OTHER_WEIGHTS)
        return Path(snapshot_download(str(checkpoint), revision=revision, ignore_patterns=ignored))


def upload(folder: Path, repo_id: str, private: bool, revision: str | None) -> str:
    """Push a folder as one commit, so that a repository has all of it or nothing. Return its id.

    Files of an earlier push that could contradict the new ones (`STALE`) are deleted in this
    commit. Other files stay. The client repeats a transfer after a lost connection. The token comes
    from HF_TOKEN or `hf auth login`.

    Args:
        private: whether the repository must be private. If False, an existing one stays as it is.
        revision: existing branch to push to. None takes main.
    """
    api = HfApi()
    with reading(f"{repo_id} was not pushed"):
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.repo_info(repo_id).private:
            raise UserError(
                f"{repo_id} already exists and is public: make it private first, or leave private "
                "out"
            )
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            commit_message="Publish with dap-transformers",
            delete_patterns=list(STALE),
        )
    return commit.oid
