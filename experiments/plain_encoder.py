"""Takes the encoder out of a checkpoint of `train_dap.py`: what is left has no heads, as most encoders on the Hub.

    python -m experiments.plain_encoder mini-mlm --output_dir mini-encoder

Training from it builds every head from random weights: that is what the ablations of the prediction head start from.
"""

import argparse
from collections.abc import Sequence

import torch
from transformers import AutoConfig, AutoTokenizer

from configuration_dap import DAPConfig
from dap.commands import command
from dap.errors import UserError
from modeling_dap import DAPModel


@command
def main(argv: Sequence[str] | None = None) -> None:
    """The command: writes encoder and tokenizer in the form that `AutoModel` and `from_encoder` read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="folder or Hub id, such as one trained with configs/mlm.yaml")
    parser.add_argument("--output_dir", required=True)
    args = parser.parse_args(argv)
    kind = AutoConfig.from_pretrained(args.checkpoint).model_type
    if kind != DAPConfig.model_type:
        raise UserError(f"{args.checkpoint} is a plain {kind!r} already: give a checkpoint of train_dap.py")
    DAPModel.from_pretrained(args.checkpoint, dtype=torch.float32).encoder.save_pretrained(args.output_dir)
    AutoTokenizer.from_pretrained(args.checkpoint).save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
