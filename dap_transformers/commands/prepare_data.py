"""Turn raw parallel text into training pairs, without noise, duplicates and leaks, as Parquet.

    prepare-data --data raw/ --evaluation_data tatoeba/ --output_dir corpus
    prepare-data --opus all --languages de fr sw --download_dir raw --output_dir corpus

Then train with `train-dap --train_data corpus`.

*Noise* is text that fails a filter. A *leak* is a pair with a side that equals, or nearly equals, a
sentence of the evaluation sets.

If a run was stopped or failed, give the same command again, or the corrected one. It does not clean
again the files that are finished.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from dap_transformers.commands.arguments import ArgumentParser
from dap_transformers.commands.safeguards import command, guarded
from dap_transformers.prepare.options import RELEASE, PrepareOptions, RawText


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command `prepare-data`."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    parser = ArgumentParser((RawText, PrepareOptions), description=__doc__.splitlines()[0])
    text, options = parser.parse_args_into_dataclasses(args=argv)
    if text.recipe:
        parser.set_defaults(**RELEASE)
        text, options = parser.parse_args_into_dataclasses(args=argv)

    # polars is an optional package, and `--help` works without it.
    from dap_transformers.prepare.data_card import counts_table
    from dap_transformers.prepare.prepare_text import prepare_text
    from dap_transformers.ray.connection import Cluster, each_on_cluster

    inputs = [Path(path).expanduser() for path in text.inputs(options)]
    with guarded({}, {"--output_dir": text.output_dir}, inputs), Cluster(text.ray).connect():
        report = prepare_text(text, options, each_on_cluster if text.ray else None)
    print(f"{counts_table(report['languages'])}\n")
    print(f"written to {text.output_dir}; README.md there explains the columns")


if __name__ == "__main__":
    main()
