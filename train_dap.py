"""Pre-train a cross-lingual sentence encoder on parallel text.

    accelerate launch train_dap.py xlmr --train_data corpus/ --output_dir out

The recipe is optional, and flags override it. Give the same command again to resume a stopped run
from its last checkpoint. docs/training.md describes all recipes.
"""

import logging
import sys
from collections.abc import Sequence

from dap_transformers.commands.recipes import parse_arguments
from dap_transformers.commands.safeguards import command, guarded
from dap_transformers.training.resume import find_resumable
from dap_transformers.training.run import train


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command `train-dap`."""
    model, data, training = parse_arguments(list(sys.argv[1:] if argv is None else argv))
    is_writer = training.process_index == 0
    logging.basicConfig(format="%(message)s", level=logging.INFO if is_writer else logging.ERROR)

    models = (model.model_name_or_path, model.config_name, model.tokenizer_name, model.distill_from)
    texts = [*data.train_data, *data.validation_data, *data.test_data()]
    try:
        with guarded({}, {"--output_dir": training.output_dir}, [*texts, *models], is_writer):
            train(model, data, training)
    except KeyboardInterrupt:
        if not is_writer:  # another process may still write the checkpoint
            raise KeyboardInterrupt from None
        last = find_resumable(training)
        resumes = f"resumes from {last}" if last else "begins anew, without a checkpoint"
        raise KeyboardInterrupt(f"the same command {resumes}") from None


if __name__ == "__main__":
    main()
