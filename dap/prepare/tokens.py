"""Subword tokenizers by name, and the ids that the English training text uses."""

from functools import cache
from typing import Any

import pyarrow.parquet as pq

from dap.errors import UserError
from dap.files import write_json
from dap.prepare.run_folder import VOCABULARY, Plan


@cache
def load_tokenizer(name: str) -> Any:
    """A fast tokenizer, whose `backend_tokenizer` (a `tokenizers.Tokenizer`) neither truncates nor pads.

    Raises:
        ValueError: there is no such tokenizer, or it is a slow one.
    """
    from dap.tokenizers import forget_calls  # Transformers takes seconds to import
    from dap.tokenizers import load_tokenizer as load

    tokenizer = load(name)
    if not tokenizer.is_fast:
        raise UserError(f"tokenizer {name} is a slow one ({type(tokenizer).__name__}); give a fast one")
    forget_calls(tokenizer)
    return tokenizer


def vocabulary_size(name: str) -> int:
    """Ids of a tokenizer, `len` of it.

    Raises:
        ValueError: as `load_tokenizer`; ids are left out, so that some are beyond this number.
    """
    ids = load_tokenizer(name).get_vocab().values()
    if max(ids) >= len(set(ids)):
        raise UserError(f"tokenizer {name} has {len(set(ids))} tokens, but ids up to {max(ids)}: number them 0, 1, …")
    return len(set(ids))


def write_vocabulary(plan: Plan) -> None:
    """Writes the ids on the English training side, special tokens but SEP left out, into `target_vocabulary.json`.

    These are what `dap.training.target_vocabulary` finds when no sentence is cut, and what `train_dap.py` restricts
    the softmax of RTL to.
    """
    name = plan.options.target_vocabulary
    tokenizer, ids = load_tokenizer(name), set()
    for path in (plan.output_dir / "train").iterdir():
        with pq.ParquetFile(path) as shard:
            for batch in shard.iter_batches(columns=["target"]):
                codes = tokenizer.backend_tokenizer.encode_batch_fast(batch["target"].to_pylist())
                ids.update(token for code in codes for token in code.ids)
    ids -= {tokenizer.cls_token_id, tokenizer.pad_token_id} - {tokenizer.sep_token_id}
    content = {"tokenizer": name, "vocab_size": vocabulary_size(name), "target_token_ids": sorted(ids)}
    write_json(content, plan.output_dir / VOCABULARY)
