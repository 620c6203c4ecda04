"""Run the project's commands in forked processes, and make the small inputs that they read.

A new Python takes 10 to 20 seconds to import torch and Transformers. A fork of a process that has
imported them starts at once.
"""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from damaged_files import write_texts


def start(command: str, printed: Path, limit: int = 120) -> int:
    """Start a command, a module and its arguments, in a forked process, and return its id.

    Args:
        printed: file for everything that the command prints.
        limit: seconds after which the process is killed.
    """
    if pid := os.fork():
        return pid
    status = 3
    try:
        handle = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)  # instead of what pytest captures
        sys.stderr = os.fdopen(2, "w", closefd=False)
        signal.alarm(limit)
        import_module("datasets").config.HF_DATASETS_CACHE = printed.parent / "cache"
        name, *arguments = command.split()
        import_module(name).main(arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_forked(command: str, folder: Path) -> tuple[int, str]:
    """Run a command in a process of its own, and return its exit status and what it printed."""
    printed = folder / "printed"
    pid = start(command, printed)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, printed.read_text(errors="replace")[-2000:].strip()


def prepare(commands: Sequence[str], base: Path) -> Path:
    """Import the commands' modules and write their inputs into a new folder.

    The inputs are written by a forked process, because the threads that Arrow and torch start would
    not survive in processes that are forked later.

    Returns:
        The folder with the inputs.
    """
    logging.disable(logging.WARNING)
    for command in commands:
        import_module(command.split()[0])
    if (pid := os.fork()) == 0:
        status = 1
        try:
            write_inputs(base / "pristine")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert status == 0, "the inputs could not be written"
    return base / "pristine"


def write_inputs(folder: Path) -> None:
    """Write everything that the commands read: text, two models, settings and result files."""
    import torch
    from transformers import BertConfig, BertModel

    from benchmarks.workload import word_tokenizer
    from dap_transformers.encoding.encoder import SentenceEncoder
    from dap_transformers.encoding.modules import write_modules
    from modeling_dap import DAPConfig, DAPForPreTraining

    write_texts(folder / "text")
    words = ["Satz", "über", "sentence", *map(str, range(40))]
    tokenizer = word_tokenizer(words)
    tokenizer.model_max_length = 32
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=160,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
    )

    # `model` is a plain encoder, `dap` a checkpoint of this project with all files it may have.
    mask = tokenizer.mask_token_id
    ours = DAPConfig(config, mask_token_id=mask, rtl_layers=1, target_vocab_size=9)
    checkpoint = DAPForPreTraining(ours)
    for name, model in {"model": BertModel(config), "dap": checkpoint}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    encoder = SentenceEncoder(checkpoint.dap, tokenizer, prefix="query: ", max_seq_length=32)
    write_modules(encoder, folder / "dap")
    record = '{"learning_rate": 0.1, "training text": {"de": "9 pairs, 0"}}'
    (folder / "dap" / "run.json").write_text(record)
    state = '{"global_step": 9, "log_history": [{"step": 1, "loss": 2.0}]}'
    (folder / "dap" / "trainer_state.json").write_text(state)

    (folder / "test").mkdir()
    (folder / "test" / "plain.txt").write_text("a sentence\nanother one\twith two parts\n")
    choices = '{"premise": "one", "choices": ["two", "three"]}\n'
    (folder / "test" / "records.jsonl").write_text(choices)

    (folder / "xnli").mkdir()
    labels = ("entailment", "neutral", "contradiction") * 20
    rows = [f"premise {n}\thypothesis {n}\t{label}\n" for n, label in enumerate(labels)]
    for name in ("train-en", "dev-en", "test-en", "test-de"):
        (folder / "xnli" / f"{name}.tsv").write_text("".join(rows))
