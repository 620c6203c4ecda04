"""Align the words of sentences with those of their translations, without training.

    align-words news.de-en.tsv --model out --output links.pharaoh
    align-words news.de news.en --model out --method itermax --output links.jsonl
    align-words test.de test.en --model out --gold test.talp --output links.pharaoh

- Input: parallel text in any format that train_dap.py reads, or two texts with one sentence per
  line. Line i of one is the translation of line i of the other.
- Output: the name chooses the format. `.tsv` has one row per link, `.jsonl` one object per pair.
  Any other name is a text in Pharaoh format: one line per pair, such as `0-1 2-0 3-3`.
- Method: links join words that are each other's nearest by cosine ("Argmax" of SimAlign). With
  `--method itermax`, a second round adds more links.
"""

import csv
import io
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field
from functools import partial
from itertools import tee, zip_longest
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from dap_transformers.alignment.align import SUBWORDS, WordAlignment, stream_alignments
from dap_transformers.alignment.links import METHODS
from dap_transformers.alignment.words import WORDS, is_unsegmented
from dap_transformers.commands.arguments import ArgumentParser, EncoderArguments
from dap_transformers.commands.edge import command, guarded
from dap_transformers.encoding.encoder import SentenceEncoder, tokens_of_a_batch
from dap_transformers.errors import UserError, counted
from dap_transformers.evaluation.word_links import alignment_quality, check_words, read_reference
from dap_transformers.files import compressed_file, plain_suffix, public_name, write_json
from dap_transformers.languages import is_blank
from dap_transformers.options import arg, require_least
from dap_transformers.text.archives import read_sentences
from dap_transformers.text.find import find_bitext
from dap_transformers.text.formats import BitextFile, LineAudit, read_tables

logger = logging.getLogger(__name__)

USAGE = """%(prog)s BITEXT --model MODEL --output FILE [options]
       %(prog)s SOURCE TARGET --model MODEL --output FILE [options]
The texts come first; what is below names the options."""
PROTOCOL = "word alignment by cosine of token states"
#: Formats whose line numbers are those of a text. Others hold pairs in units of other kinds.
NOT_LINES = ("tmx", "po", "hub")
#: Columns of a `.tsv` output.
COLUMNS = ("pair", "source_position", "target_position", "source_word", "target_word", "cosine")
REFUSED = (".parquet", ".csv", ".json", ".bz2", ".zst", ".lz4", ".7z", ".zip")


class Pair(NamedTuple):
    """A sentence pair of the text to align.

    Attributes:
        number: its number in the text, from 1. In formats with lines it is that of its line.
        source: the source sentence.
        target: the target sentence.
    """

    number: int
    source: str
    target: str


@dataclass
class TokenEncoderArguments(EncoderArguments):
    """Options that choose the encoder, without pooling, because token states are aligned."""

    model_name_or_path: str = arg(
        MISSING,
        "A DAP checkpoint, any encoder of AutoModel, or a sentence-transformers folder; a folder "
        "or a Hub id.",
        aliases=["--model"],
    )
    pooling: str | None = field(default=None, init=False)
    max_seq_length: int | None = arg(
        None,
        "Tokens per sentence. Words beyond get no link. Default: the sentence-transformers "
        "folder's, else 128.",
    )

    def load(self) -> SentenceEncoder:
        """Load the encoder that the options choose, with its token states."""
        options = asdict(self)
        name = options.pop("model_name_or_path")
        options["pooling"] = "mean"  # for a plain encoder, which would warn without it
        return SentenceEncoder.from_pretrained(name, **options)


@dataclass
class AlignmentArguments:
    """Options of word alignment: what to align, how to align it, and which files to write.

    The name of `report_file` is filled in if it is not given.

    Raises:
        UserError: a number is not allowed, `--output` is missing, or its format is not written.
    """

    output: str | None = arg(
        None, "File for the links: .tsv, .jsonl, or any other name for Pharaoh; also .gz or .xz."
    )
    method: str = arg(
        "argmax",
        "'argmax' links words that are each other's nearest, 'itermax' adds links in a second "
        "round.",
        choices=METHODS,
    )
    layer: int | None = arg(
        None,
        "Hidden layer of the token states, from 0 (embeddings). Default: the last. SimAlign takes "
        "8 of mBERT and XLM-R.",
    )
    words: str = arg(
        "spaces",
        "'spaces': words stand between spaces, as for SimAlign and fast_align. 'tokenizer': words "
        "of the tokenizer, for text without spaces such as Chinese.",
        choices=WORDS,
    )
    subwords: str = arg(
        "mean",
        "State of a word: the 'mean' of its subwords or the 'first'. 'link' links subwords, and "
        "with them their words.",
        choices=SUBWORDS,
    )
    gold: str | None = arg(
        None, "Reference links in Pharaoh format, with 2p3 for possible ones: prints AER."
    )
    gold_from: int = arg(0, "Number of a sentence's first word in --gold: 0 or 1.")
    language: str | None = arg(None, "Source language to align, if the parallel text has several.")
    target_language: str = arg("en", "Language of the target side of parallel text.")
    columns: list[int] | None = arg(
        None, "Columns of source and target in TSV files, such as '2 3'. Default: the first two."
    )
    max_bad_lines: float = arg(
        0.001, "Share of malformed lines that parallel text may have. They get no links."
    )
    token_budget: int | None = arg(
        None, "Most tokens per batch. It does not change the results. Default: 4096, on CUDA 32768."
    )
    report_file: str | None = arg(None, "JSON report. Default: OUTPUT.json.")

    def __post_init__(self) -> None:
        require_least(self, token_budget=1)
        if self.gold_from not in (0, 1):
            raise UserError(f"--gold_from {self.gold_from}: give 0 or 1")
        if not self.output:
            raise UserError("--output is missing: name the file for the links")
        if self.output.endswith(REFUSED):
            raise UserError(
                f"--output {self.output}: links are written as .tsv, .jsonl or Pharaoh (any other "
                "name), also .gz or .xz; choose another ending"
            )
        self.report_file = self.report_file or f"{self.output}.json"

    @property
    def format(self) -> str:
        """Return the format of the output by its name: "tsv", "jsonl", or "pharaoh" for all others.

        An ending .gz or .xz is ignored.
        """
        return {".tsv": "tsv", ".jsonl": "jsonl"}.get(plain_suffix(self.output), "pharaoh")


def _parse(
    argv: Sequence[str] | None,
) -> tuple[TokenEncoderArguments, AlignmentArguments, list[str]]:
    """Parse the command line, and check that the options fit together.

    Returns:
        The options of the encoder and of the alignment, and the names of the one or two texts.
    """
    types = (TokenEncoderArguments, AlignmentArguments)
    parser = ArgumentParser(types, description=__doc__.splitlines()[0], usage=USAGE)
    parser.add_argument(
        "files",
        nargs="*",
        help="parallel text, or source text and target text, before all options",
    )
    model_args, args, positional, rest = parser.parse_args_into_dataclasses(
        args=argv, return_remaining_strings=True
    )
    if rest:
        raise UserError(
            f"{' '.join(rest)}: no such option, or a text in the wrong place; the texts come first"
        )
    files = positional.files
    if len(files) not in (1, 2):
        raise UserError(
            f"texts given: {' '.join(files) or 'none'}; name parallel text, or a source text and a "
            "target text"
        )
    if len(files) == 2 and args.language:
        raise UserError("--language is for parallel text: two texts have one language each")
    return model_args, args, files


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Link the words of sentences to the words of their translations, from command-line arguments.

    The links and the JSON report are written to files. With `--gold`, the alignment error rate is
    printed.

    Args:
        argv: arguments of the command. None takes those of this process.

    Returns:
        The report that is also written as JSON.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    model_args, args, files = _parse(argv)
    inputs = [*files, args.gold] if args.gold else list(files)
    outputs = {"--output": args.output, "--report_file": args.report_file}

    with guarded(outputs, inputs=inputs, model=model_args.model_name_or_path):
        # read everything once, so that faults are found before the model is loaded
        read = partial(read_lines, files) if len(files) == 2 else partial(read_bitext, files, args)
        total = count_pairs(read, files, args.words)
        gold = read_reference(args.gold, total, args.gold_from) if args.gold else None

        # align
        encoder = model_args.load()
        started = time.perf_counter()
        counts = dict.fromkeys(("pairs", "words", "links", "words_without_state"), 0)
        found = []
        with open_output(args) as write:
            for number, (pair, aligned) in enumerate(aligned_pairs(encoder, read(), total, args)):
                write(pair, aligned)
                counts["pairs"] += 1
                counts["words"] += len(aligned.source) + len(aligned.target)
                counts["links"] += len(aligned.links)
                counts["words_without_state"] += aligned.without_state
                if gold is not None:
                    check_words(number + 1, aligned, gold[number])
                    found.append(aligned.links)
        seconds = time.perf_counter() - started

        # report
        numbers: dict[str, Any] = dict(counts)
        if gold is not None:
            numbers |= alignment_quality(found, gold)
        settings = {
            "data": [public_name(path) for path in files],
            "pooling": f"{args.subwords} of subwords",
            "method": args.method,
            "words": args.words,
            "gold": public_name(args.gold) if args.gold else None,
        }
        if args.layer is not None:
            settings["layer"] = args.layer
        content = model_args.report(encoder, PROTOCOL, numbers, settings, seconds)
        write_json(content, args.report_file)
    if counts["words_without_state"]:
        logger.warning(
            "%s without a token, so without a link: raise --max_seq_length %s if sentences were "
            "cut",
            counted(counts["words_without_state"], "word"),
            encoder.max_seq_length,
        )
    links = counted(counts["links"], "link")
    pairs = counted(counts["pairs"], "pair")
    print(f"{links} in {pairs} ({seconds:.1f} s); written to {args.output} and {args.report_file}")
    if gold is not None:
        template = "AER {aer:.2f}, precision {precision:.2f}, recall {recall:.2f}"
        print(f"{template.format(**numbers)} against {args.gold}")
    return content


# From files to pairs


def read_lines(files: Sequence[str]) -> Iterator[Pair]:
    """Yield the sentence pairs of two texts, line by line. One or both sentences may be empty.

    Args:
        files: names of the source file and the target file.
    """
    source_file, target_file = files
    lines = zip_longest(read_sentences(source_file), read_sentences(target_file))
    for number, (source, target) in enumerate(lines, 1):
        if source is None or target is None:
            shorter, longer = files if source is None else files[::-1]
            raise UserError(
                f"{shorter} ends after line {number - 1}, {longer} goes on: line i of one must "
                "translate line i of the other"
            )
        # A line without anything that a reader sees holds no words.
        source = "" if is_blank(source) else source
        target = "" if is_blank(target) else target
        yield Pair(number, source, target)


def read_bitext(files: Sequence[str], args: AlignmentArguments) -> Iterator[Pair]:
    """Yield the sentence pairs of parallel text in one language.

    A malformed line becomes a pair of empty sentences. Pairs are numbered through all files.

    Args:
        files: files, folders or ids of Hub datasets.
        args: options that choose the languages and columns.
    """
    found = find_bitext(files, args.target_language, args.columns)
    language = args.language or next(iter(found))
    if language not in found or (args.language is None and len(found) > 1):
        given = f"--language {args.language}" if args.language else files[0]
        raise UserError(
            f"{given}: there is text in {' '.join(found)}; give one of them as --language"
        )
    before = 0  # pairs of the files before
    for file in found[language]:
        number = 0
        for pair in _pairs_of_file(file, args.max_bad_lines):
            number = pair.number
            yield pair._replace(number=before + number)
        before += number


def _pairs_of_file(file: BitextFile, max_bad_lines: float) -> Iterator[Pair]:
    """Yield the sentence pairs of a file, and empty pairs for lines that are malformed."""
    audit = LineAudit(file, max_bad_lines)
    number = 0
    for table in read_tables(file, audit):
        columns = (table[name].to_pylist() for name in ("line", "source", "target"))
        for line, source, target in zip(*columns, strict=True):
            number += 1
            if file.format in NOT_LINES:
                yield Pair(number, source, target)
                continue
            while number < line:
                yield Pair(number, "", "")
                number += 1
            yield Pair(line, source, target)
    while file.format not in NOT_LINES and number < audit.lines:
        number += 1
        yield Pair(number, "", "")


def count_pairs(read: Callable[[], Iterable[Pair]], files: Sequence[str], words: str) -> int:
    """Read the text once, and return its number of pairs.

    If words are found by spaces, but most pairs have a sentence without spaces between words, a
    warning is logged.

    Args:
        read: function that yields the pairs of the text.
        files: names of its files, for the message.
        words: the value of `--words`, "spaces" or "tokenizer".
    """
    total = 0
    unsegmented = 0
    for pair in read():
        total += 1
        unsegmented += is_unsegmented(pair.source) or is_unsegmented(pair.target)
    if not total:
        raise UserError(f"{' and '.join(files)}: there is no sentence to align")
    if words == "spaces" and unsegmented > total / 2:
        logger.warning(
            "%d of %d pairs have no spaces between words: give --words tokenizer, or put spaces "
            "between the words",
            unsegmented,
            total,
        )
    return total


# From pairs to links


def aligned_pairs(
    encoder: SentenceEncoder, pairs: Iterable[Pair], total: int, args: AlignmentArguments
) -> Iterator[tuple[Pair, WordAlignment]]:
    """Align the words of each sentence pair, and show a progress bar.

    Args:
        encoder: makes the token states.
        pairs: the sentence pairs.
        total: their number, for the progress bar.
        args: options of the alignment.

    Yields:
        Each pair with its alignment, in the given order.
    """
    pairs, read_ahead = tee(pairs)
    aligned = stream_alignments(
        encoder,
        ((pair.source, pair.target) for pair in read_ahead),
        args.method,
        args.subwords,
        args.words,
        tokens_of_a_batch(args.token_budget),
        args.layer,
    )
    bar = tqdm(aligned, total=total, desc="aligning", unit=" pairs")
    # The alignments run ahead, so they come first: `zip` would lose a pair otherwise.
    for alignment, pair in zip(bar, pairs):
        yield pair, alignment


@contextmanager
def open_output(args: AlignmentArguments) -> Iterator[Callable[[Pair, WordAlignment], None]]:
    """Open the output file. It takes its name only when the block ends without an error.

    Args:
        args: options with the name of the file, which decides its format.

    Yields:
        A function that writes the links of one sentence pair.
    """
    with compressed_file(args.output) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        rows = csv.writer(text, delimiter="\t", lineterminator="\n")
        if args.format == "tsv":
            rows.writerow(COLUMNS)

        def write(pair: Pair, aligned: WordAlignment) -> None:
            if args.format == "tsv":
                rows.writerows(link_rows(pair, aligned))
            elif args.format == "jsonl":
                text.write(json.dumps(as_object(pair, aligned), ensure_ascii=False) + "\n")
            else:
                text.write(aligned.pharaoh() + "\n")

        yield write
        text.flush()
        text.detach()  # `compressed_file` closes the file


def link_rows(pair: Pair, aligned: WordAlignment) -> Iterator[tuple[int | str, ...]]:
    """Yield the values of the `COLUMNS` for each link of a sentence pair.

    Args:
        pair: the sentences and their number.
        aligned: their words and links.
    """
    for (i, j), cosine in zip(aligned.links.tolist(), aligned.cosines.tolist(), strict=True):
        yield pair.number, i, j, aligned.source[i], aligned.target[j], f"{cosine:.4f}"


def as_object(pair: Pair, aligned: WordAlignment) -> dict[str, Any]:
    """Return the words and links of a sentence pair as an object for the `.jsonl` output.

    Args:
        pair: the sentences and their number.
        aligned: their words and links.
    """
    return {
        "pair": pair.number,
        "source": aligned.source,
        "target": aligned.target,
        "links": aligned.links.tolist(),
        "cosines": [round(cosine, 4) for cosine in aligned.cosines.tolist()],
    }


main = command(run)


if __name__ == "__main__":
    main()
