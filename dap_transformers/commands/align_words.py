"""Align the words of sentences with those of their translations, without training.

    align-words news.de-en.tsv --model out --output links.pharaoh
    align-words news.de news.en --model out --method itermax --output links.jsonl
    align-words news.de news.en --model out --output links.tsv --lexicon words.tsv --min_count 3
    align-words test.de test.en --model out --gold test.talp --output links.pharaoh

- Input: parallel text in any format that train-dap reads, or two texts with one sentence per line.
  Line i of one is the translation of line i of the other.
- Output: the name chooses the format. `.tsv` has one row per link, `.jsonl` one object per pair.
  Any other name is a text in Pharaoh format: one line per pair, such as `0-1 2-0 3-3`.
- Word list: `--lexicon` counts which words are linked, for example to start a glossary.
- Method: links join words that are each other's nearest by cosine ("Argmax" of SimAlign). With
  `--method itermax`, a second round adds more links.
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field
from typing import Any

from tqdm.auto import tqdm

from dap_transformers.alignment.word_alignment import (
    AlignmentOptions,
    check_pairs,
    read_bitext,
    read_lines,
    stream_alignments,
    write_links,
    write_word_list,
)
from dap_transformers.commands.arguments import ArgumentParser
from dap_transformers.commands.encoder_arguments import EncoderArguments
from dap_transformers.commands.safeguards import command, guarded
from dap_transformers.errors import UserError, counted
from dap_transformers.evaluation.word_links import judge, read_reference
from dap_transformers.files import plain_suffix, public_name, write_json
from dap_transformers.options import arg

logger = logging.getLogger(__name__)

USAGE = """%(prog)s BITEXT --model MODEL --output FILE [options]
       %(prog)s SOURCE TARGET --model MODEL --output FILE [options]
The texts come first; what is below names the options."""
PROTOCOL = "word alignment by cosine of token states"


@dataclass
class TokenEncoderArguments(EncoderArguments):
    """Options that choose the encoder, without pooling, because token states are aligned."""

    pooling: str = field(default="mean", init=False)  # a plain encoder would warn without it


@dataclass
class AlignmentArguments:
    """Command-line arguments of word alignment: what to align, and which files to write."""

    output: str = arg(
        MISSING, "File for the links: .tsv, .jsonl, or any other name for Pharaoh; also .gz or .xz."
    )
    lexicon: str | None = arg(
        None,
        "File for a word list, .tsv: pairs of linked words with the number of their links, and all "
        "links of the source word and of the target word. The most frequent pair comes first.",
    )
    min_count: int = arg(1, "With --lexicon: fewest links of a pair of words.")
    gold: str | None = arg(
        None, "Reference links in Pharaoh format, with 2p3 for possible ones: prints AER."
    )
    gold_from: int = arg(0, "Number of a sentence's first word in --gold.", choices=(0, 1))
    language: str | None = arg(None, "Source language to align, if the parallel text has several.")
    target_language: str = arg("en", "Language of the target side of parallel text.")
    max_bad_lines: float = arg(
        0.001, "Share of malformed lines that parallel text may have. They get no links."
    )
    report_file: str | None = arg(None, "JSON report. Default: OUTPUT.json.")

    def __post_init__(self) -> None:
        if plain_suffix(self.output) in (".csv", ".json", ".parquet", ".xlsx", ".zip"):
            raise UserError(
                f"--output {self.output}: write .tsv, .jsonl, or .txt for Pharaoh links"
            )
        self.report_file = self.report_file or f"{self.output}.json"


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Link the words of sentences to the words of their translations, as the command line says.

    Returns:
        The report that is also written as JSON.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    types = (TokenEncoderArguments, AlignmentArguments, AlignmentOptions)
    parser = ArgumentParser(types, description=__doc__.splitlines()[0], usage=USAGE)
    text = "parallel text, or source text and target text, before all options"
    parser.add_argument("files", nargs="+", help=text)
    model_args, args, options, positional = parser.parse_args_into_dataclasses(args=argv)
    files = positional.files
    if len(files) > 2 or (len(files) == 2 and args.language):
        raise UserError(
            f"{' '.join(files)}: give parallel text, whose language you may choose, or a source "
            "text and a target text"
        )
    options.words = options.words or ("spaces" if args.gold else "punctuation")
    outputs = {
        "--output": args.output, "--lexicon": args.lexicon, "--report_file": args.report_file
    }  # fmt: skip
    inputs = [*files, args.gold, model_args.model_name_or_path]

    with guarded(outputs, {}, inputs):
        # read everything before the model is loaded, so that faults are found early
        if len(files) == 2:
            pairs = list(read_lines(*files))
        else:
            chosen = (args.language, args.target_language, args.max_bad_lines)
            pairs = list(read_bitext(files, *chosen))
        check_pairs(pairs, options)
        total = len(pairs)
        gold = read_reference(args.gold, total, args.gold_from) if args.gold else None

        # align
        encoder = model_args.load()
        started = time.perf_counter()
        aligned = stream_alignments(encoder, pairs, options)
        aligned = tqdm(aligned, total=total, desc="aligning", unit=" pairs")
        quality = {}
        if gold:
            aligned = list(aligned)
            quality = judge(aligned, gold)
        words = Counter() if args.lexicon else None
        numbers = write_links(aligned, args.output, words) | quality
        if args.lexicon:
            write_word_list(words, args.lexicon, args.min_count)
        seconds = time.perf_counter() - started

        # write the report
        settings = asdict(options) | {
            "data": [public_name(path) for path in files],
            "pooling": "mean of subwords",
            "gold": public_name(args.gold) if args.gold else None,
        }
        content = model_args.report(encoder, PROTOCOL, numbers, settings, seconds)
        write_json(content, args.report_file)

    if numbers["words_without_state"]:
        words = counted(numbers["words_without_state"], "word")
        text = "%s without a token, so without a link: raise --max_seq_length %s if it cut them"
        logger.warning(text, words, encoder.max_seq_length)
    done = f"{counted(numbers['links'], 'link')} in {counted(total, 'pair')} ({seconds:.1f} s)"
    print(f"{done}; written to {args.output} and {args.report_file}")
    if gold:
        template = "AER {aer:.2f}, precision {precision:.2f}, recall {recall:.2f}"
        print(f"{template.format(**numbers)} against {args.gold}")
    return content


main = command(run)


if __name__ == "__main__":
    main()
