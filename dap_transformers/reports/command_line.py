"""Merge the reports of several seeds, or compare those of several trainings.

python -m dap_transformers.reports seed1.json seed2.json seed3.json --output merged.json
python -m dap_transformers.reports --compare K=1:abl/k1-*.json K=2:abl/k2-*.json --format latex
"""

import argparse
from collections.abc import Sequence
from typing import Any

from dap_transformers.commands.edge import add_version, command, guarded
from dap_transformers.errors import UserError
from dap_transformers.files import whole_file, write_json
from dap_transformers.reports.compare import FORMATS, comparison, files_of_groups, read_groups
from dap_transformers.reports.merge import merge_pairs, merged_table, paper_beside
from dap_transformers.reports.records import read_report


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Merge or compare the reports that the command line names, and print the tables.

    With `--output`, the merged report is written as JSON, or the comparison in its format.

    Args:
        argv: the command line. None takes the process's own.

    Returns:
        The merged report. With `--compare`, the groups by name: means and deviations by metric.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dap_transformers.reports", description=__doc__.splitlines()[0]
    )
    parser.add_argument("reports", nargs="*", help="JSON reports of one evaluation, one per seed")
    parser.add_argument("--output", help="file to write: the merged report, or the comparison")
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="NAME:FILES",
        help="compare groups of reports, such as K=1:abl/k1-*.json K=2:abl/k2-*.json",
    )
    parser.add_argument(
        "--format", choices=FORMATS, default="text", help="format of the comparison (text)"
    )
    parser.add_argument(
        "--languages", action="store_true", help="also compare each language by itself"
    )
    add_version(parser)
    arguments = parser.parse_args(argv)
    if bool(arguments.reports) == bool(arguments.compare):
        raise UserError("give the reports of one training to merge, or --compare with groups")
    if arguments.compare:
        return _compare(arguments)
    if arguments.format != "text" or arguments.languages:
        raise UserError("--format and --languages are for --compare: leave them out")
    return _merge(arguments)


def _merge(arguments: argparse.Namespace) -> dict[str, Any]:
    """Merge the reports of the seeds of one training, print the tables, and return the result."""
    for path in arguments.reports:
        if arguments.reports.count(path) > 1:
            raise UserError(f"{path} is given twice: give each report once")

    outputs = {} if arguments.output is None else {"--output": arguments.output}
    with guarded(outputs, inputs=arguments.reports):
        merged = merge_pairs({path: read_report(path) for path in arguments.reports})
        if arguments.output:
            write_json(merged, arguments.output)

    print(f"{merged['model']}: {merged['protocol']}")
    print(f"mean ± sample standard deviation, n={merged['n']}\n")
    print(merged_table(merged))
    if table := paper_beside(merged):
        print(f"\n{table}")
    if arguments.output:
        print(f"written to {arguments.output}")
    return merged


def _compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare groups of reports, print or write the tables, and return the numbers by group."""
    files = files_of_groups(arguments.compare)
    inputs = [file for own in files.values() for file in own]
    outputs = {} if arguments.output is None else {"--output": arguments.output}
    with guarded(outputs, inputs=inputs):
        groups = read_groups(files, arguments.languages)
        table = comparison(groups, arguments.format)
        print(table)
        if arguments.output:
            with whole_file(arguments.output) as file:
                file.write(f"{table}\n".encode())
    if arguments.output:
        print(f"written to {arguments.output}")
    found = {}
    for group in groups:
        found[group.name] = {"mean": group.means, "sd": group.deviations, "n": group.count}
    return found


main = command(run)
