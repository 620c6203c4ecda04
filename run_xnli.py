"""Fine-tune an encoder on English XNLI, and test it in 15 languages without further training.

    accelerate launch run_xnli.py --model_name_or_path out --data_dir xnli/ --train_data mnli.tsv \\
        --output_dir xnli-out

`--data_dir` takes a folder with `dev-{xx}.tsv` and `test-{xx}.tsv` (see
dap_transformers/xnli/data.py), or a Hub id such as `facebook/xnli`. Each learning rate is a run
with its own folder in `output_dir`. If you give the same command again, finished runs are used
again and a stopped run resumes from its checkpoint.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dap_transformers.commands.arguments import ArgumentParser
from dap_transformers.commands.encoder_arguments import BaseEncoderArguments
from dap_transformers.commands.safeguards import command, guarded
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.evaluation.evaluator import console_tables
from dap_transformers.evaluation.paper import xnli_table
from dap_transformers.tables import text_table
from dap_transformers.xnli.data import TextOptions
from dap_transformers.xnli.finetuning import XNLITrainingArguments, fine_tune_and_test


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Fine-tune an encoder on XNLI and test it, as the command line says. Return `xnli.json`."""
    types = (BaseEncoderArguments, TextOptions, XNLITrainingArguments)
    parser = ArgumentParser(types)
    args, text, training = parser.parse_args_into_dataclasses(args=argv)

    folder = Path(training.output_dir)
    is_writer = training.process_index == 0
    logging.basicConfig(format="%(message)s", level=logging.INFO if is_writer else logging.ERROR)
    model = args.model_name_or_path
    inputs = [text.data_dir, text.train_data, model]
    with guarded({}, {"--output_dir": folder}, inputs, is_writer):
        encoder = SentenceEncoder.from_pretrained(
            model,
            args.pooling,
            revision=args.revision,
            trust_remote_code=args.trust_remote_code,
            device="cpu",
            prefix="",
            max_seq_length=text.max_seq_length,
        )
        content = fine_tune_and_test(model, encoder, text, training)

    if is_writer:
        print(summary(content))
        print(f"written to {folder / 'xnli.json'}")
    return content


def summary(content: Mapping[str, Any]) -> str:
    """Format a report as text: the search if there was one, languages, and the paper's results."""
    parts = []
    if tried := content["settings"]["search"]:
        rows = []
        for each in tried:
            rate = each["learning_rate"]
            mark = " (taken)" if rate == content["settings"]["learning_rate"] else ""
            rows.append([f"{rate:g}{mark}", each["dev_accuracy"]])
        parts.append(text_table(["learning rate", "dev accuracy"], rows))
    parts.append(console_tables(content["metrics"]))
    accuracies = {code: numbers["accuracy"] for code, numbers in content["languages"].items()}
    parts.append(xnli_table(accuracies))
    return "\n\n".join(parts)


main = command(run)


if __name__ == "__main__":
    main()
