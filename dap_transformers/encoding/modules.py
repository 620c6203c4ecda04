"""The files of a sentence-transformers folder beside its modules: lengths and prompts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dap_transformers.encoding.load import longest_input
from dap_transformers.files import write_json
from modules_dap import save_modules


def library_length(
    named: int | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Return how many tokens per sentence the sentence-transformers library keeps.

    It takes the length in the folder's files or, if that is None, the smaller of the limits in the
    tokenizer and the model's config. Limits of 0 or below mean no limit, as in XLNet's config. The
    result is never above the model's number of positions. XLM-R's folders name 514 for 512.
    """
    lengths = [named or tokenizer.model_max_length, longest_input(model)]
    if not named:
        lengths.append(getattr(model.config, "max_position_embeddings", None))
    return min(length for length in lengths if length is not None and length > 0)


def write_modules(
    encoder: Any,
    folder: Path,
    similarity: str | None = None,
    prompts: Mapping[str, str] | None = None,
) -> None:
    """Write the files that make `SentenceTransformer(folder)` give the encoder's vectors.

    The folder must already hold the model and the tokenizer. For a DAP model, the user has to give
    `trust_remote_code=True` or import `modeling_dap`.

    Args:
        similarity: "cosine" or "dot". None takes a DAP model's own, or else "cosine".
    """
    save_modules(folder, encoder.pooling, encoder.hidden_size, encoder.after)

    cut = {"max_seq_length": encoder.max_seq_length, "do_lower_case": False}
    write_json(cut, folder / "sentence_bert_config.json")

    prompts = dict(prompts or {})
    default = None
    if encoder.prefix:
        same = [name for name, text in prompts.items() if text == encoder.prefix]
        default = same[0] if same else "text"
        # encode_query and encode_document use only prompts of these names
        own = dict.fromkeys((default, "query", "document"), encoder.prefix)
        prompts = own | prompts
    settings = {
        "prompts": prompts,
        "default_prompt_name": default,
        "similarity_fn_name": similarity
        or getattr(encoder.model.config, "tr_similarity", "cosine"),
    }
    write_json(settings, folder / "config_sentence_transformers.json")
