"""Encoding with PyTorch, ONNX and int8 ONNX: sentences a second, size of the weights, accuracy of retrieval.

    python benchmarks/inference.py --model out --data_dir tatoeba/ --languages de sw --json inference.json

Contenders take turns in one process with the same number of threads (`OMP_NUM_THREADS`); medians over the repeats. A
sentence counts once, although pairs may share it. Not called onnx.py: Python would take that for the library.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from dap.encoding import FLOAT32, INT8, OnnxEncoder, SentenceEncoder
from dap.files import write_json
from dap.publishing.onnx_export import export
from dap.reports import machine, text_table, versions
from dap.search import retrieval_accuracy
from eval_retrieval import read_languages


def contenders(model: str, folder: Path) -> dict[str, tuple[SentenceEncoder, int]]:
    """Name -> encoder and the bytes of its weights."""
    torch_encoder = SentenceEncoder.from_pretrained(model, device="cpu")
    export(torch_encoder, folder, int8=True)
    size = sum(tensor.nbytes for tensor in torch_encoder.model.state_dict().values())
    files = {"onnx": folder / "onnx" / FLOAT32, "onnx int8": folder / "onnx" / INT8}
    found = {name: (OnnxEncoder(path), path.stat().st_size) for name, path in files.items()}
    return {"torch": (torch_encoder, size)} | found


def measure(encoder: SentenceEncoder, pairs: dict[str, list[tuple[str, str]]]) -> dict[str, Any]:
    """One encoding of all text: seconds, CPU seconds, and the mean accuracy of both directions in percent."""
    sides = [list(side) for rows in pairs.values() for side in zip(*rows, strict=True)]
    sentences = [text for side in sides for text in side]
    started, cpu = time.perf_counter(), time.process_time()
    vectors = encoder.encode(sentences)  # (N, D)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    parts = np.split(vectors, np.cumsum([len(side) for side in sides])[:-1])
    accuracies = [retrieval_accuracy(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    forward, backward = np.mean(accuracies, axis=0).tolist()
    return {"seconds": seconds, "cpu": cpu, "sentences": len(set(sentences)), "xx-en": forward, "en-xx": backward}


def compare(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Contender -> medians over the repeats, its size, and all single runs."""
    pairs = read_languages(args.data_dir, args.languages)
    with tempfile.TemporaryDirectory(prefix="dap-onnx-") as folder:
        encoders = contenders(args.model, Path(folder))
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in encoders}
        for _ in range(args.repeats):
            for name, (encoder, _) in encoders.items():
                runs[name].append(measure(encoder, pairs))
    return {
        name: {key: statistics.median(run[key] for run in part) for key in part[0]}
        | {"bytes": encoders[name][1], "runs": part}
        for name, part in runs.items()
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """The medians as text."""
    header = ["encoder", "MB", "sentences / s", "sentences / CPU s", "xx→en", "en→xx"]
    lines = [
        [
            name,
            f"{part['bytes'] / 1e6:.0f}",
            f"{part['sentences'] / part['seconds']:.0f}",
            f"{part['sentences'] / part['cpu']:.0f}",
            part["xx-en"],
            part["en-xx"],
        ]
        for name, part in found.items()
    ]
    return text_table(header, lines)


def main(argv: list[str] | None = None) -> None:
    """Prints a table; `--json` keeps everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="checkpoint")
    parser.add_argument("--data_dir", nargs="+", required=True, help="parallel text with English")
    parser.add_argument("--languages", nargs="+", help="default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="file to write")
    args = parser.parse_args(argv)
    found = compare(args)
    print(table(found))
    if args.json:
        write_json({"machine": machine(), "versions": versions(), "encoders": found}, args.json)


if __name__ == "__main__":
    main()
