"""Bitext retrieval accuracy in both directions, on Tatoeba or on your own parallel text.

    python eval_retrieval.py --model user/dap-xlmr --data_dir tatoeba/ --output_file out.json

- Data: `--data_dir` takes a folder in Tatoeba's layout (`tatoeba.deu-eng.deu` and
  `tatoeba.deu-eng.eng`) or any other parallel text that training reads, such as `de-en.tsv`.
- Directions: "xx→en" queries with language xx and retrieves from the English side. "en→xx" is the
  other way round.
- Multilingual pool: `--pool multilingual` also measures retrieval where the other sentences of the
  query's own language are candidates.
- Hard negatives: `--hard_negatives` also measures how often a source prefers a changed copy of an
  English sentence to the translation (xsim++).
- Reuse: with `--embeddings_dir` a second run of the same model on the same text encodes nothing.
- Several processes: `accelerate launch` shares the encoding among processes.

Legend: `N` sentences of all texts together, `D` hidden size.
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import MISSING, astuple, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from dap_transformers.commands.arguments import ArgumentParser
from dap_transformers.commands.edge import check_folders, command, guarded
from dap_transformers.commands.encoder_arguments import EncoderArguments, tokens_of_a_batch
from dap_transformers.encoding.encoder import Encoder, SentenceEncoder
from dap_transformers.encoding.shards import (
    embed_to_disk,
    encode_shared,
    launched,
    model_fingerprint,
    require_finite,
)
from dap_transformers.errors import UserError, counted
from dap_transformers.evaluation.hard_negatives import (
    COPY_KINDS,
    Copy,
    hard_negative_copies,
    hard_negative_errors,
)
from dap_transformers.evaluation.paper import DIRECTIONS, PAPER_MODELS, POOL_KEYS, tatoeba_tables
from dap_transformers.evaluation.retrieval import (
    group_averages,
    multilingual_pool_accuracy,
    retrieval_accuracy,
)
from dap_transformers.files import claimed, public_name, write_json
from dap_transformers.languages import NAMES, base_language
from dap_transformers.options import arg
from dap_transformers.pictures import drawable_languages, plot_accuracies, require_drawable
from dap_transformers.ray.connection import ClusterArguments
from dap_transformers.ray.encoder import load_on
from dap_transformers.reports import read_report
from dap_transformers.tables import text_table
from dap_transformers.text.archives import disk_path
from dap_transformers.text.find import find_bitext
from dap_transformers.text.formats import BitextFile, read_pairs

PROTOCOL = (
    "bitext retrieval: nearest neighbour by cosine over the other side, accuracy by line, macro "
    "averages"
)
SOURCE = "source side"
ENGLISH = "English side"
COPIES = "copies"

#: Language code -> (source, English) sentences in file order. The source is the sentence of the
#: language.
PairsByLanguage = dict[str, list[tuple[str, str]]]
#: Language code -> its files of parallel text.
FilesByLanguage = dict[str, list[BitextFile]]
#: Language code -> hard negatives of its English side.
CopiesByLanguage = dict[str, list[Copy]]
#: A language code, and one of `SOURCE`, `ENGLISH` and `COPIES`.
TextName = tuple[str, str]
Texts = dict[TextName, list[str]]
#: Language code -> accuracy in percent (xx→en, en→xx).
Accuracies = dict[str, tuple[float, float]]
POOLS = ("monolingual", "multilingual")


@dataclass
class RetrievalDataArguments:
    """Command-line arguments of a retrieval evaluation: what to evaluate on, and what to write.

    Raises:
        UserError: `--max_pairs` is below 1, `--before` is given without `--plot`, or `--plot` has
            another ending than .svg, .png or .pdf.
    """

    data_dir: list[str] = arg(MISSING, "Folders or files of parallel text with English.")
    languages: list[str] | None = arg(
        None, "Codes such as 'de fr' or 'deu fra'. Default: all languages in data_dir."
    )
    columns: list[int] | None = arg(
        None, "Columns of source and target in TSV files, such as '2 3'. Default: the first two."
    )
    max_pairs: int | None = arg(
        None, "Use only the first pairs of each language, for a quick look. Default: all."
    )
    pool: str = arg(
        "monolingual",
        "Candidates of a query. 'monolingual' takes the sentences of the other language only. "
        "'multilingual' also measures a pool that holds the other sentences of the query's "
        "language, too.",
        choices=POOLS,
    )
    hard_negatives: bool = arg(
        False,
        "Also measure the error if copies of the English sentences with another number, meaning or "
        "name are candidates (xsim++).",
    )
    output_file: str | None = arg(None, "JSON file to write.")
    output_dir: str | None = arg(None, "Folder to write retrieval.json into.")
    plot: str | None = arg(None, "Picture of accuracy by language to draw: .svg, .png or .pdf.")
    before: str | None = arg(None, "JSON file of another model, for --plot to compare with.")
    embeddings_dir: str | None = arg(
        None, "Folder that keeps the vectors for other runs of the same model on the same text."
    )
    token_budget: int | None = arg(
        None,
        "Most tokens per batch. It does not change the results. Default: 4096, on CUDA 32768.",
    )

    def __post_init__(self) -> None:
        if self.max_pairs is not None and self.max_pairs < 1:
            raise UserError(f"--max_pairs {self.max_pairs}: give 1 or more, or leave it out")
        if self.before and not self.plot:
            raise UserError(f"--before {self.before} is for a picture: name that with --plot")
        if self.plot:
            require_drawable("--plot", self.plot)

    def reports(self) -> dict[str, Path]:
        """Return the JSON files to write: name of the argument, such as "--output_file" -> path.

        Arguments that are not given are left out.
        """
        paths = {}
        if self.output_file:
            paths["--output_file"] = Path(self.output_file)
        if self.output_dir:
            paths["--output_dir"] = Path(self.output_dir, "retrieval.json")
        return paths

    def outputs(self) -> dict[str, Path]:
        """Return all files to write, JSON and picture: name of the argument -> path.

        Arguments that are not given are left out.
        """
        paths = self.reports()
        if self.plot:
            paths["--plot"] = Path(self.plot)
        return paths


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure retrieval accuracy as the command line says, print tables, and write the report.

    Args:
        argv: arguments of the command. None takes those of this process.

    Returns:
        The report that is also written as JSON. If there are several processes, only the first one
        searches and writes, and the others return an empty report.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    types = (EncoderArguments, RetrievalDataArguments, ClusterArguments)
    parser = ArgumentParser(types, description=__doc__.splitlines()[0])
    model_args, data_args, cluster = parser.parse_args_into_dataclasses(args=argv)
    name = model_args.model_name_or_path
    is_main = launched().is_main_process

    earlier = _read_earlier_report(data_args.before)
    found = find_bitext(data_args.data_dir, columns=data_args.columns)
    files = _paths_of(found)
    inputs = [disk_path(file) for file in files]
    if data_args.before:
        inputs.append(data_args.before)
    if data_args.embeddings_dir:
        kept = {"--embeddings_dir": data_args.embeddings_dir}
        check_folders(kept, [*data_args.data_dir, *inputs, name])
    with (
        guarded(data_args.outputs(), inputs=inputs, model=name, is_writer=is_main),
        cluster.connect(),
    ):
        # read the pairs and load the model
        pairs = read_found(found, data_args.data_dir, data_args.languages, data_args.max_pairs)
        copies = copies_of(pairs) if data_args.hard_negatives else None
        encoder = load_on(cluster, model_args)
        if is_main:
            languages = counted(len(pairs), "language")
            print(f"{model_args.summary(encoder)}; {languages}")

        # encode
        started = time.perf_counter()
        token_budget = tokens_of_a_batch(data_args.token_budget)
        texts = texts_of(pairs, copies)
        vectors = encode_texts(encoder, texts, token_budget, is_main, data_args.embeddings_dir)
        if not is_main:
            return {}

        # retrieve
        has_pool = data_args.pool == "multilingual"
        numbers = retrieval_numbers(pairs, vectors, has_pool)
        seconds = time.perf_counter() - started
        if copies is not None:
            numbers["hard_negatives"] = hard_negative_numbers(pairs, copies, vectors)

        # write and print the report
        settings = _settings(data_args, pairs, copies)
        content = model_args.report(encoder, PROTOCOL, numbers, settings, seconds)
        written = []
        try:
            written = _write(content, data_args, earlier)
        finally:  # numbers are not lost if they cannot be written
            is_tatoeba = all(Path(file).name.startswith("tatoeba.") for file in files)
            # Fewer candidates are easier.
            is_comparable = is_tatoeba and data_args.max_pairs is None
            print(tatoeba_tables(numbers, Path(name).name, PAPER_MODELS if is_comparable else ()))
            if has_pool:
                print(f"\n{pool_table(numbers)}")
            if copies is not None:
                print(f"\n{hard_negative_table(numbers['hard_negatives'])}")
        for line in written:
            print(line)
    return content


def evaluate_retrieval(
    model: str | Encoder,
    data: str | Path | Sequence[str | Path],
    languages: Sequence[str] | None = None,
    pool: str = "monolingual",
    hard_negatives: bool = False,
    max_pairs: int | None = None,
    token_budget: int = 4096,
) -> dict[str, Any]:
    """Measure retrieval accuracy from Python, as the command does.

    Example:
        numbers = evaluate_retrieval("out", "tatoeba/", languages=["de", "fr"])
        print(numbers["averages"]["2 of 36 languages"]["xx-en"])  # percent

    Args:
        model: a folder, a Hub id, or an encoder that is loaded already.
        data: folders or files of parallel text with English, as of `--data_dir`.
        languages: codes of the languages to evaluate. None evaluates all.
        pool: "monolingual", or "multilingual" to also measure a pool that holds the other sentences
            of the query's language.
        hard_negatives: also measure the error with changed copies of the English sentences.
        max_pairs: most pairs of each language, from the first on. None takes all.
        token_budget: most tokens per batch, padding included.

    Returns:
        "languages" -> language code -> "pairs", "xx-en" and "en-xx" (accuracy in percent).
        "averages" -> group of languages -> "xx-en" and "en-xx". With the other options also their
        numbers, under the names of the JSON report.
    """
    if pool not in POOLS:
        raise UserError(f"pool={pool!r}: give one of {', '.join(POOLS)}")
    paths = [data] if isinstance(data, str | Path) else list(data)
    pairs = read_languages([str(path) for path in paths], languages, max_pairs)
    copies = copies_of(pairs) if hard_negatives else None
    encoder = SentenceEncoder.from_pretrained(model) if isinstance(model, str) else model

    vectors = encode_texts(encoder, texts_of(pairs, copies), token_budget)
    numbers = retrieval_numbers(pairs, vectors, pool == "multilingual")
    if copies is not None:
        numbers["hard_negatives"] = hard_negative_numbers(pairs, copies, vectors)
    return numbers


# From files to texts


def _paths_of(found: FilesByLanguage) -> list[str]:
    """Return the paths of all files of parallel text."""
    paths = []
    for language_files in found.values():
        for file in language_files:
            paths += file.paths
    return paths


def read_languages(
    paths: Sequence[str],
    languages: Sequence[str] | None = None,
    max_pairs: int | None = None,
    columns: Sequence[int] | None = None,
) -> PairsByLanguage:
    """Read parallel text with English.

    Args:
        paths: files or folders. Several files of one language are joined in their order.
        languages: codes of the languages to read. None reads all.
        max_pairs: most pairs to keep of each language, from the first on. None keeps all.
        columns: the columns of source and target in TSV files, from 1. None: the first two.

    Returns:
        Language code -> (source, English) pairs in file order.
    """
    return read_found(find_bitext(paths, columns=columns), paths, languages, max_pairs)


def read_found(
    found: FilesByLanguage,
    paths: Sequence[str],
    languages: Sequence[str] | None = None,
    max_pairs: int | None = None,
) -> PairsByLanguage:
    """Read parallel text with English from files that are found already.

    Args:
        found: language code -> files. Several files of one language are joined in their order.
        paths: the files or folders where they were found, for the error message.
        languages: codes of the languages to read. None reads all.
        max_pairs: most pairs to keep of each language, from the first on. None keeps all.

    Returns:
        Language code -> (source, English) pairs in file order.
    """
    if languages is None:
        wanted = list(found)
    else:
        wanted = list(dict.fromkeys(base_language(code) for code in languages))
    absent = [code for code in wanted if code not in found]
    if absent:
        raise UserError(
            f"--languages {' '.join(absent)}: {', '.join(paths)} holds {' '.join(found)} only"
        )
    pairs: PairsByLanguage = {}
    for code in wanted:
        rows = chain.from_iterable(read_pairs(file, max_bad_lines=0.0) for file in found[code])
        pairs[code] = [(row["source"], row["target"]) for row in rows][:max_pairs]
    return pairs


def copies_of(pairs: PairsByLanguage) -> CopiesByLanguage:
    """Make changed copies of each language's English sentences, which serve as hard negatives.

    Args:
        pairs: language code -> (source, English) sentences.

    Returns:
        Language code -> copies of its English sentences
        (`dap_transformers.search.hard_negative_copies`).
    """
    copies = {}
    for code, rows in pairs.items():
        copies[code] = hard_negative_copies([english for _, english in rows])
    return copies


def texts_of(pairs: PairsByLanguage, copies: CopiesByLanguage | None = None) -> Texts:
    """Collect the sentences to encode.

    Args:
        pairs: language code -> (source, English) sentences.
        copies: language code -> changed copies of its English sentences. None if there are none.

    Returns:
        (language code, side) -> sentences, for the source side, the English side and the copies.
    """
    texts: Texts = {}
    for code, rows in pairs.items():
        texts[code, SOURCE] = [source for source, _ in rows]
        texts[code, ENGLISH] = [english for _, english in rows]
        if copies is not None:
            texts[code, COPIES] = [copy.text for copy in copies[code]]
    return texts


# From texts to vectors


def encode_texts(
    encoder: Encoder,
    texts: Texts,
    token_budget: int = 4096,
    progress: bool = False,
    embeddings_dir: str | None = None,
) -> dict[TextName, np.ndarray]:
    """Encode all texts together, each distinct sentence once.

    The processes of a launch share the work.

    Args:
        encoder: the encoder.
        texts: (language code, side) -> sentences.
        token_budget: most tokens per batch, padding included.
        progress: show a bar.
        embeddings_dir: folder that keeps the vectors for later runs, in a folder per model and
            text. Vectors that are already there are read instead of encoding. None keeps none.

    Returns:
        (language code, side) -> vectors (n, D) of its n sentences. In a launch of several
        processes, only the first gets them. The others get an empty dictionary.
    """
    sentences = list(chain.from_iterable(texts.values()))
    distinct = list(dict.fromkeys(sentences))
    if embeddings_dir is None:
        vectors = encode_shared(encoder, distinct, token_budget, progress)
    else:
        folder = Path(embeddings_dir)
        vectors = _encode_to_disk(encoder, distinct, folder, token_budget, progress, texts)
    if not launched().is_main_process:
        return {}

    # give each sentence the vector of its distinct sentence
    row_of = {sentence: row for row, sentence in enumerate(distinct)}
    vectors = vectors[[row_of[sentence] for sentence in sentences]]  # (N, D)
    require_finite(vectors, sentences, lambda row: _place(texts, row))

    # cut them into texts
    ends = np.cumsum([len(text) for text in texts.values()])
    return dict(zip(texts, np.split(vectors, ends[:-1]), strict=True))


def _encode_to_disk(
    encoder: Encoder,
    distinct: list[str],
    embeddings_dir: Path,
    token_budget: int,
    progress: bool,
    texts: Texts,
) -> np.ndarray:
    """Encode distinct sentences, or read their vectors from the folder of this model and text.

    Returns:
        Vectors (distinct sentences, D), memory mapped. In a launch only the first process gets
        them, and the others get (0, D).
    """
    fingerprint = model_fingerprint(encoder)
    folder = embeddings_dir / f"{fingerprint[:16]}-{digest(distinct)}"

    def place_of_row(row: int) -> str:
        sentences = list(chain.from_iterable(texts.values()))
        return _place(texts, sentences.index(distinct[row]))

    is_main = launched().is_main_process
    with claimed(folder, "--embeddings_dir") if is_main else nullcontext():
        return embed_to_disk(
            encoder,
            distinct,
            folder,
            token_budget=token_budget,
            progress=progress,
            where=place_of_row,
            fingerprint=fingerprint,
        )


def _place(texts: Texts, number: int) -> str:
    """Return where a sentence stands: language, number of its pair or copy, and side.

    Error messages use this.

    >>> texts = texts_of({"de": [("Ja", "Yes")], "fr": [("Oui", "Yes"), ("Non", "No")]})
    >>> _place(texts, 5)
    'fr, pair 2, English side'
    """
    for (code, side), sentences in texts.items():
        if number < len(sentences):
            unit = "copy" if side == COPIES else "pair"
            return f"{code}, {unit} {number + 1}, {side}"
        number -= len(sentences)
    raise IndexError(number)


# From vectors to numbers


def evaluate(encoder: Encoder, pairs: PairsByLanguage, token_budget: int = 4096) -> Accuracies:
    """Encode both sides of each language, and measure retrieval accuracy in both directions.

    Args:
        encoder: the encoder.
        pairs: language code -> (source, English) sentences.
        token_budget: most tokens per batch, padding included.

    Returns:
        Language code -> accuracy in percent (xx→en, en→xx).
    """
    return accuracies_of(encode_texts(encoder, texts_of(pairs), token_budget))


def retrieval_numbers(
    pairs: PairsByLanguage, vectors: Mapping[TextName, np.ndarray], has_pool: bool
) -> dict[str, Any]:
    """Measure retrieval accuracy, and put it into the form of the report.

    Args:
        pairs: language code -> (source, English) sentences.
        vectors: (language code, side) -> vectors (n, D), as `encode_texts` returns them.
        has_pool: also measure the pool that holds the other sentences of the query's language.
    """
    numbers = accuracy_numbers(pairs, accuracies_of(vectors))
    if has_pool:
        add_pool_numbers(numbers, vectors)
    return numbers


def accuracies_of(vectors: Mapping[TextName, np.ndarray]) -> Accuracies:
    """Compute each language's retrieval accuracy in both directions.

    Args:
        vectors: (language code, side) -> vectors (n, D), as `encode_texts` returns them.

    Returns:
        Language code -> accuracy in percent (xx→en, en→xx).
    """
    accuracies = {}
    for code, side in vectors:
        if side == SOURCE:
            accuracies[code] = retrieval_accuracy(vectors[code, SOURCE], vectors[code, ENGLISH])
    return accuracies


def accuracy_numbers(pairs: PairsByLanguage, accuracies: Accuracies) -> dict[str, Any]:
    """Put accuracies into the form of the report, and add averages over groups of languages.

    Args:
        pairs: language code -> (source, English) sentences. Their number goes into the report.
        accuracies: language code -> accuracy in percent (xx→en, en→xx).

    Returns:
        "languages" -> language code -> "pairs" (their number), "xx-en" and "en-xx" (accuracy in
        percent). "averages" -> name of a group, such as "36 languages" -> "xx-en" and "en-xx".
    """
    languages = {}
    for code, accuracy in accuracies.items():
        languages[code] = {"pairs": len(pairs[code])} | _by_direction(accuracy)
    averages = {}
    for group, accuracy in group_averages(accuracies).items():
        averages[group] = _by_direction(accuracy)
    return {"languages": languages, "averages": averages}


def _by_direction(accuracy: tuple[float, float]) -> dict[str, float]:
    """Return the accuracies (xx→en, en→xx) by their names in the report, with 4 decimals."""
    forward, backward = accuracy
    return {"xx-en": round(forward, 4), "en-xx": round(backward, 4)}


def pool_numbers(vectors: Mapping[TextName, np.ndarray]) -> dict[str, dict[str, float]]:
    """Measure retrieval where the query's own language is in the pool of candidates.

    Args:
        vectors: (language code, side) -> vectors (n, D), as `encode_texts` returns them.

    Returns:
        Language code, or name of a group of languages such as "36 languages" -> (name in the report
        -> share of the queries in percent). "pool_xx-en" is the share of queries in language xx
        whose nearest candidate is their translation. "own_xx-en" is the share whose nearest
        candidate is in their own language. "pool_en-xx" and "own_en-xx" are those of English
        queries.
    """
    shares = {}
    for code, side in vectors:
        if side == SOURCE:
            forward, backward = multilingual_pool_accuracy(
                vectors[code, SOURCE], vectors[code, ENGLISH]
            )
            shares[code] = (*astuple(forward), *astuple(backward))
    numbers = {}
    for place, values in (shares | group_averages(shares)).items():
        rounded = [round(value, 4) for value in values]
        numbers[place] = dict(zip(POOL_KEYS, rounded, strict=True))
    return numbers


def add_pool_numbers(numbers: dict[str, Any], vectors: Mapping[TextName, np.ndarray]) -> None:
    """Add the results of `pool_numbers` to each language and each average of the report.

    Args:
        numbers: result of `accuracy_numbers`, changed in place.
        vectors: (language code, side) -> vectors (n, D), as `encode_texts` returns them.
    """
    found = pool_numbers(vectors)
    for places in numbers.values():  # languages, and averages
        for place in places:
            places[place] |= found[place]


def hard_negative_numbers(
    pairs: PairsByLanguage,
    copies: CopiesByLanguage,
    vectors: Mapping[TextName, np.ndarray],
) -> dict[str, Any]:
    """Measure how often a source finds something else than its translation (xsim++).

    The candidates are all English sentences of its language's text, and their changed copies.

    Args:
        pairs: language code -> (source, English) sentences.
        copies: language code -> changed copies of its English sentences.
        vectors: (language code, side) -> vectors (n, D), as `encode_texts` returns them.

    Returns:
        Language code -> its results. And "mean" -> {"error": means over the languages}. The results
        of a language are:

        - "pairs": number of pairs.
        - "without_copies": number of pairs whose English sentence has no copy.
        - "copies": kind of change -> number of copies.
        - "error": result of `hard_negative_errors`, a dictionary of shares in percent.
    """
    numbers: dict[str, Any] = {}
    errors = []
    for code, language_copies in copies.items():
        kinds = [copy.kind for copy in language_copies]
        error = hard_negative_errors(
            vectors[code, SOURCE], vectors[code, ENGLISH], vectors[code, COPIES], kinds
        )
        error = {preferred: round(share, 4) for preferred, share in error.items()}
        errors.append(error)
        have_copies = {copy.sentence for copy in language_copies}
        numbers[code] = {
            "pairs": len(pairs[code]),
            "without_copies": sum(english not in have_copies for _, english in pairs[code]),
            "copies": {kind: kinds.count(kind) for kind in COPY_KINDS},
            "error": error,
        }
    mean = {}
    for preferred in errors[0]:
        mean[preferred] = float(np.mean([error[preferred] for error in errors]))
    return numbers | {"mean": {"error": mean}}


# The report


def pool_table(numbers: dict[str, Any]) -> str:
    """Format accuracy without and with the query's own language in the pool, as a text table.

    It has a row per language and per average.

    Args:
        numbers: result of `accuracy_numbers`, completed by `add_pool_numbers`.
    """
    header = ["multilingual pool", "", "pairs"]
    for arrow in DIRECTIONS.values():
        header += [arrow, "in the pool", "lost to own language"]
    rows = []
    for code, each in numbers["languages"].items():
        rows.append([code, NAMES.get(code, ""), each["pairs"], *_pool_cells(each)])
    for group, each in numbers["averages"].items():
        rows.append(["mean", group, "", *_pool_cells(each)])
    return text_table(header, rows)


def _pool_cells(numbers: Mapping[str, float]) -> list[float]:
    """Return a row's cells for both directions: accuracy, in the pool, lost to own language."""
    cells = []
    for direction in DIRECTIONS:
        cells += [numbers[direction], numbers[f"pool_{direction}"], numbers[f"own_{direction}"]]
    return cells


def hard_negative_table(numbers: dict[str, Any]) -> str:
    """Format the result of `hard_negative_numbers` as a text table.

    It has a row per language and one for the mean.
    """
    header = ["hard negatives", "pairs", "without copies"]
    header += [f"{kind} copies" for kind in COPY_KINDS]
    header += ["error %", *(f"by {preferred}" for preferred in (*COPY_KINDS, "other"))]
    rows = []
    for code, each in numbers.items():
        counts = each.get("copies", dict.fromkeys(COPY_KINDS))  # the mean has none
        row = [code, each.get("pairs"), each.get("without_copies")]
        rows.append([*row, *counts.values(), *each["error"].values()])
    return text_table(header, rows)


def _read_earlier_report(path: str | None) -> dict[str, Any]:
    """Read the report of `--before`, which the picture compares with.

    Returns:
        {"before": report}, or {} without a file.
    """
    if not path:
        return {}
    report = read_report(path)
    if not drawable_languages(report):
        raise UserError(
            f"--before {path}: no accuracies by language; give a report of eval_retrieval.py"
        )
    return {"before": report}


def _settings(
    data_args: RetrievalDataArguments, pairs: PairsByLanguage, copies: CopiesByLanguage | None
) -> dict[str, Any]:
    """Return the settings for the report, name -> value.

    Returns:
        "data", "text" (a hash of the pairs) and "max_pairs". Also "pool" if it is multilingual, and
        "hard_negatives" (a hash of the copies) if there are any.
    """
    settings = {
        "data": [public_name(path) for path in data_args.data_dir],
        "text": digest(pairs),
        "max_pairs": data_args.max_pairs,
    }
    if data_args.pool == "multilingual":
        settings["pool"] = data_args.pool
    if copies is not None:
        settings["hard_negatives"] = digest(copies)
    return settings


def digest(text: Any) -> str:
    """Return 12 hexadecimal digits of a hash of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()[:12]


def _write(
    content: dict[str, Any], args: RetrievalDataArguments, earlier: dict[str, Any]
) -> list[str]:
    """Write the report and draw the picture, as far as the arguments ask for them.

    Returns:
        A line about each file.
    """
    lines = []
    for path in args.reports().values():
        write_json(content, path)
        lines.append(f"written to {path}")
    if args.plot:
        label = "after" if earlier else "accuracy"
        plot_accuracies(earlier | {label: content}, args.plot)
        lines.append(f"drawn in {args.plot}")
    return lines


main = command(run)


if __name__ == "__main__":
    main()
