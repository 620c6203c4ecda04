"""Bitext retrieval accuracy in both directions, on Tatoeba or on your own parallel text.

    python eval_retrieval.py --model_name_or_path user/dap-xlmr --data_dir tatoeba/ --output_file results.json

`--data_dir` takes a folder in Tatoeba's layout (`tatoeba.deu-eng.deu` + `tatoeba.deu-eng.eng`) or anything else that
training reads (`de-en.tsv`, …). "xx→en" queries with language xx and retrieves from the English side. With
`--embeddings_dir` a second run of the same model on the same text encodes nothing, and `accelerate launch` shares the
encoding among processes. A file that `dap.publishing.onnx_export` wrote is a model too, such as
`out/onnx/model_quantized.onnx`. `--hard_negatives` also measures how often a source prefers a changed copy of an
English sentence (xsim++).

Legend: `N` sentences of all sides, `D` hidden size.
"""

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import MISSING, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from dap.arguments import ArgumentParser, arg
from dap.commands import claimed, command, guarded
from dap.encoding import (
    Encoder,
    EncoderArguments,
    embed_to_disk,
    encode_shared,
    launched,
    model_fingerprint,
    require_finite,
    tokens_of_a_batch,
)
from dap.errors import UserError
from dap.file_io import write_json
from dap.languages import base_language
from dap.ray.connection import ClusterArguments
from dap.ray.ray_encoder import load_on
from dap.reports import (
    PAPER_MODELS,
    drawable_languages,
    plot_accuracies,
    read_report,
    require_drawable,
    tatoeba_tables,
    text_table,
)
from dap.search import (
    COPY_KINDS,
    Copy,
    group_averages,
    hard_negative_copies,
    hard_negative_errors,
    retrieval_accuracy,
)
from dap.text import disk_path, find_bitext, read_pairs

PROTOCOL = "bitext retrieval: nearest neighbour by cosine over the other side, accuracy by line, macro averages"

Pairs = dict[str, list[tuple[str, str]]]
Copies = dict[str, list[Copy]]
Place = tuple[str, str]  # language code, and "source side", "English side" or "copies"
Sides = dict[Place, list[str]]


@dataclass
class DataArguments:
    """What to evaluate on, and where the numbers go."""

    data_dir: list[str] = arg(MISSING, "Folder(s) or file(s) of parallel text with English.")
    languages: list[str] | None = arg(
        None, "Codes such as 'de fr' or 'deu fra'. Default: all that data_dir holds."
    )
    max_pairs: int | None = arg(
        None, "Only the first pairs of each language, for a quick look. Default: all."
    )
    hard_negatives: bool = arg(
        False, "Also the error where copies of the English sentences with another number, meaning or name are "
        "candidates (xsim++)."
    )  # fmt: skip
    output_file: str | None = arg(None, "JSON file to write.")
    output_dir: str | None = arg(None, "Folder to write retrieval.json into.")
    plot: str | None = arg(None, "Picture to draw, .svg, .png or .pdf: accuracy by language.")
    before: str | None = arg(None, "JSON file of another model, which --plot draws too.")
    embeddings_dir: str | None = arg(
        None, "Folder that keeps the vectors; those of the same model and text are not made anew."
    )
    token_budget: int | None = arg(
        None, "Most tokens a batch. Default: 4096, on CUDA 32768. Results do not depend on it."
    )

    def __post_init__(self) -> None:
        if self.before and not self.plot:
            raise UserError(f"--before {self.before} is for a picture: name that with --plot")
        if self.plot:
            require_drawable("--plot", self.plot)

    def outputs(self) -> dict[str, Path]:
        """Argument -> file that it asks for."""
        return self.reports() | ({"--plot": Path(self.plot)} if self.plot else {})

    def reports(self) -> dict[str, Path]:
        """Argument -> JSON file that it asks for."""
        paths = {"--output_file": Path(self.output_file)} if self.output_file else {}
        return paths | (
            {"--output_dir": Path(self.output_dir, "retrieval.json")} if self.output_dir else {}
        )


def read_languages(
    paths: Sequence[str], languages: Sequence[str] | None = None, max_pairs: int | None = None
) -> Pairs:
    """Language code -> (source, English) pairs in file order; files of one language follow each other.

    Raises:
        ValueError: a language asked for has no file, a file has no pairs, or `max_pairs` is below 1.
    """
    if max_pairs is not None and max_pairs < 1:
        raise UserError(f"--max_pairs {max_pairs}: give 1 or more, or leave it out")
    found = find_bitext(paths)
    wanted = (
        list(found) if languages is None else list(dict.fromkeys(map(base_language, languages)))
    )
    absent = [code for code in wanted if code not in found]
    if absent:
        raise UserError(
            f"--languages {' '.join(absent)}: {', '.join(paths)} holds {' '.join(found)} only"
        )
    pairs: Pairs = {}
    for code in wanted:
        rows = (pair for file in found[code] for pair in read_pairs(file, max_bad_lines=0.0))
        pairs[code] = [(pair["source"], pair["target"]) for pair in rows][:max_pairs]
    return pairs


def evaluate(
    encoder: Encoder, pairs: Pairs, *arguments: Any, **options: Any
) -> dict[str, tuple[float, float]]:
    """Language code -> accuracy in percent, (xx→en, en→xx), with the vectors of `encode_sides`."""
    return accuracies_of(encode_sides(encoder, sides_of(pairs), *arguments, **options))


def copies_of(pairs: Pairs) -> Copies:
    """Language code -> the hard negatives of its English side."""
    return {
        code: hard_negative_copies([english for _, english in rows]) for code, rows in pairs.items()
    }


def sides_of(pairs: Pairs, copies: Copies | None = None) -> Sides:
    """The sentences to encode by their place: both sides of each language, and its hard negatives, if any."""
    sides: Sides = {}
    for code, rows in pairs.items():
        source, english = zip(*rows, strict=True)
        sides |= {(code, "source side"): list(source), (code, "English side"): list(english)}
        if copies is not None:
            sides[code, "copies"] = [copy.text for copy in copies[code]]
    return sides


def encode_sides(
    encoder: Encoder,
    sides: Sides,
    token_budget: int = 4096,
    progress: bool = False,
    embeddings_dir: str | None = None,
) -> dict[Place, np.ndarray]:
    """The vectors of each side's sentences, all encoded in one go; of several processes only the first gets them.

    Args:
        embeddings_dir: keeps the vectors, in a folder of their own for each model and text; None keeps none.

    Raises:
        ValueError: a vector with NaN or infinity, whose sentence is named.
    """
    sentences = list(chain(*sides.values()))
    rows = {
        sentence: row for row, sentence in enumerate(dict.fromkeys(sentences))
    }  # each is encoded once
    if embeddings_dir is None:
        embeds = encode_shared(encoder, list(rows), token_budget, progress)
    else:
        embeds = _kept(encoder, list(rows), Path(embeddings_dir), token_budget, progress, sides)
    if not launched().is_main_process:
        return {}
    embeds = embeds[[rows[sentence] for sentence in sentences]]  # (N, D)
    require_finite(embeds, sentences, partial(_place, sides))
    ends = np.cumsum([len(side) for side in sides.values()])
    return dict(zip(sides, np.split(embeds, ends[:-1]), strict=True))


def _kept(
    encoder: Encoder,
    sentences: list[str],
    folder: Path,
    token_budget: int,
    progress: bool,
    sides: Sides,
) -> np.ndarray:
    """`encoder.encode(sentences)` through the folder of this model and text; no sentence comes twice."""
    fingerprint = model_fingerprint(encoder)
    own = folder / f"{fingerprint[:16]}-{_digest(sentences)}"
    with claimed(own, "--embeddings_dir") if launched().is_main_process else nullcontext():
        return embed_to_disk(
            encoder,
            sentences,
            own,
            token_budget=token_budget,
            progress=progress,
            where=lambda row: _place(sides, list(chain(*sides.values())).index(sentences[row])),
            fingerprint=fingerprint,
        )


def _place(sides: Sides, number: int) -> str:
    """Where a sentence is, counted over one side after the other.

    >>> _place(sides_of({"de": [("Ja", "Yes")], "fr": [("Oui", "Yes"), ("Non", "No")]}), 5)
    'fr, pair 2, English side'
    """
    for (code, side), sentences in sides.items():
        if number < len(sentences):
            return f"{code}, {'copy' if side == 'copies' else 'pair'} {number + 1}, {side}"
        number -= len(sentences)
    raise IndexError(number)


def accuracies_of(vectors: dict[Place, np.ndarray]) -> dict[str, tuple[float, float]]:
    """Language code -> accuracy in percent, (xx→en, en→xx)."""
    codes = dict.fromkeys(code for code, _ in vectors)
    return {
        code: retrieval_accuracy(vectors[code, "source side"], vectors[code, "English side"])
        for code in codes
    }


def hard_negative_results(
    pairs: Pairs, copies: Copies, vectors: dict[Place, np.ndarray]
) -> dict[str, Any]:
    """What the JSON report says: the numbers of copies, errors in percent by language, and their means.

    Returns:
        Language code -> "pairs", "without_copies" (pairs whose English sentence has none), "copies" by kind, and
        "error" in percent, by what won. "mean" -> the errors' means over the languages.
    """
    results: dict[str, Any] = {}
    for code, made in copies.items():
        kinds, sides = [copy.kind for copy in made], ("source side", "English side", "copies")
        error = hard_negative_errors(*(vectors[code, side] for side in sides), kinds)
        changed = {copy.sentence for copy in made}
        without = sum(english not in changed for _, english in pairs[code])
        counts = {kind: kinds.count(kind) for kind in COPY_KINDS}
        results[code] = {"pairs": len(pairs[code]), "without_copies": without, "copies": counts}
        results[code]["error"] = {won: round(share, 4) for won, share in error.items()}
    errors = [numbers["error"] for numbers in results.values()]
    return results | {
        "mean": {
            "error": {won: float(np.mean([each[won] for each in errors])) for won in errors[0]}
        }
    }


def hard_negative_table(numbers: dict[str, Any]) -> str:
    """`hard_negative_results` as a table: copies and errors by language, and the mean."""
    header = ["hard negatives", "pairs", "without", *(f"{kind}s" for kind in COPY_KINDS), "error %"]
    rows = []
    for code, each in numbers.items():
        counts = each.get("copies", dict.fromkeys(COPY_KINDS))
        rows.append(
            [
                code,
                each.get("pairs"),
                each.get("without_copies"),
                *counts.values(),
                *each["error"].values(),
            ]
        )
    return text_table([*header, *(f"by {won}" for won in (*COPY_KINDS, "other"))], rows)


def _digest(text: Any) -> str:
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()[:12]


def results(pairs: Pairs, accuracies: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """What the JSON report says: accuracy in percent and number of pairs a language, and the averages."""
    languages = {
        code: {"pairs": len(pairs[code])} | _directions(accuracy)
        for code, accuracy in accuracies.items()
    }
    averages = {name: _directions(mean) for name, mean in group_averages(accuracies).items()}
    return {"languages": languages, "averages": averages}


def _directions(accuracy: tuple[float, float]) -> dict[str, float]:
    return {"xx-en": round(accuracy[0], 4), "en-xx": round(accuracy[1], 4)}


def write(content: dict[str, Any], args: DataArguments, earlier: dict[str, Any]) -> None:
    """Writes the report, and draws it beside an earlier one, if any."""
    for path in args.reports().values():
        write_json(content, path)
        print(f"written to {path}")
    if args.plot:
        plot_accuracies(earlier | {"after" if earlier else "accuracy": content}, args.plot)
        print(f"drawn in {args.plot}")


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Evaluates as the command line `argv` says (None: the process's own); returns the report that it writes.

    Of several processes only the first searches and writes; the others return an empty report.

    Raises:
        UserError: arguments or data that do not fit, or a model that cannot be loaded or gives NaN.
        OSError: no such data, or no room for the vectors.
    """
    types = (EncoderArguments, DataArguments, ClusterArguments)
    parser = ArgumentParser(types, description=__doc__.splitlines()[0])
    model_args, data_args, cluster = parser.parse_args_into_dataclasses(args=argv)
    found = find_bitext(data_args.data_dir)
    files = [path for each in found.values() for file in each for path in file.paths]
    name = model_args.model_name_or_path
    is_main = launched().is_main_process
    earlier = {"before": read_report(data_args.before)} if data_args.before else {}
    if earlier and not drawable_languages(earlier["before"]):
        raise UserError(
            f"--before {data_args.before}: no accuracies by language; give a report of eval_retrieval.py"
        )
    inputs = [*map(disk_path, files), *filter(None, [data_args.before])]
    with (
        guarded(data_args.outputs(), inputs=inputs, model=name, is_writer=is_main),
        cluster.connect(),
    ):
        pairs = read_languages(data_args.data_dir, data_args.languages, data_args.max_pairs)
        encoder = load_on(cluster, model_args)
        layer = "" if encoder.layer is None else f" of layer {encoder.layer}"
        if is_main:
            print(f"{name}: pooling {encoder.pooling}{layer}, prefix {encoder.prefix!r}, "
                  f"at most {encoder.max_seq_length} tokens; {len(pairs)} languages")  # fmt: skip
        token_budget, started = tokens_of_a_batch(data_args.token_budget), time.perf_counter()
        copies = copies_of(pairs) if data_args.hard_negatives else None
        sides = sides_of(pairs, copies)
        vectors = encode_sides(encoder, sides, token_budget, is_main, data_args.embeddings_dir)
        if not is_main:
            return {}
        numbers = results(pairs, accuracies_of(vectors))
        seconds = time.perf_counter() - started
        settings = {
            "data": data_args.data_dir,
            "text": _digest(pairs),
            "max_pairs": data_args.max_pairs,
        }
        if copies is not None:
            settings["hard_negatives"] = _digest(copies)
            numbers["hard_negatives"] = hard_negative_results(pairs, copies, vectors)
        is_tatoeba = all(
            Path(path).name.startswith("tatoeba.") for path in files
        )  # such as tatoeba.deu-eng.deu
        is_whole = data_args.max_pairs is None  # with fewer pairs there are fewer candidates
        content = model_args.report(encoder, PROTOCOL, numbers, settings, seconds)
        print(
            tatoeba_tables(
                numbers, Path(name).name, PAPER_MODELS if is_tatoeba and is_whole else ()
            )
        )
        if copies is not None:
            print(f"\n{hard_negative_table(numbers['hard_negatives'])}")
        write(content, data_args, earlier)
    return content


@command
def main(argv: Sequence[str] | None = None) -> None:
    """The command: `run`."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    run(argv)
    launched().destroy_process_group()


if __name__ == "__main__":
    main()
