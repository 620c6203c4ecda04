"""Damage what the commands read, at random, and see that each run ends well.

    python -m benchmarks.fuzz --minutes 30

A run must end with status 0, or with a status and one line; no input may change, and nothing appear outside of `out/`.
A reader must count every line, as a pair or as a bad one, or refuse the file in one line. The tests run `read_damaged`
with few cases. What is found is printed with its number: `--first N --cases 1` shows it again.
"""

import argparse
import gzip
import json
import logging
import lzma
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dap.errors import UserError, one_line
from dap.text import LineAudit, find_bitext, read_tables

PIECES = [
    b"\n",
    b"\r",
    b"\r\n",
    b"\t",
    b"\0",
    bytes(4),
    b"\xff",
    b"\xef\xbb\xbf",
    b"\xe2\x80\xa8",
    b'"',
    b"{",
    b"]",
]
VALUES = [
    b"NaN",
    b"-1",
    b"0",
    b"1e999",
    b"1000000000",
    b"null",
    b"[]",
    b"[3]",
    b"{}",
    b"true",
    b'"x"',
    b'""',
    b"0.5",
]
PIECES += [
    b"<",
    b">",
    b"</tu>",
    b"\x1b[2J",
    b"NaN",
    b"-1",
    b"1e999",
    b"null",
    b"[]",
    b"\\ud800",
    b"\xed\xa0\x80",
]
SHORT = "--max_steps 1 --per_device_train_batch_size 4 --report_to none --save_strategy no --eval_strategy no"
#: Command and arguments. What is named here is made by `write_inputs`, and one file of it damaged: model/ is a plain
#: encoder, dap/ a checkpoint of ours with all that may lie beside it.
COMMANDS = (
    "prepare_data --data text --evaluation_data test --licences licences.json --list_leaks out/l --output_dir out/c",
    "prepare_data --data text --max_bad_lines 0.9 --target_vocabulary model --output_dir out/c",
    "mine_bitext text/a.fr text/a.en --model model --pooling cls --output out/p",
    "eval_retrieval --data_dir text --model model --hard_negatives --output_file out/r",
    f"train_dap --train_data text --model_name_or_path model --dev_pairs 2 --use_cpu {SHORT} --output_dir out/t",
    f"train_dap recipe.yaml --model_name_or_path model --use_cpu {SHORT} --output_dir out/t",
    f"run_xnli --data_dir xnli --model_name_or_path model --use_cpu {SHORT} --output_dir out/x",
    "push_to_hub model --repo_id user/a --pooling cls --dry_run --output_dir out/h",
    "mine_bitext text/a.fr text/a.en --model dap --output out/p",
    f"train_dap --train_data text/de-en.tsv --model_name_or_path dap --use_cpu {SHORT} --output_dir out/t",
    f"run_xnli --data_dir xnli --model_name_or_path dap --use_cpu {SHORT} --output_dir out/x",
    "push_to_hub dap --repo_id user/a --with_heads --dry_run --output_dir out/h",
    "dap.reports.merge run.json other.json --output out/m",
)


# ------------------------------------------------------------------------------------------------ damage


def damaged(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """The bytes of a file with one thing wrong, or those of something else."""
    start = draw.randrange(len(data) + 1)
    end = min(len(data), start + draw.choice([1, 4, 60, 1000]))
    kind = draw.randrange(9)
    values = [found.span() for found in re.finditer(rb'(?<=": )[^\s,{}\[\]]+', data)]  # of JSON
    if kind == 0:
        return data[:start]
    if kind == 1:
        return draw.randbytes(draw.choice([0, 1, 50, 5000]))
    if kind == 2:
        return data + draw.choice([data, bytes(draw.randrange(9)), b"trailing"])
    if kind == 3:
        return draw.choice(others)
    if kind == 8 and values:
        start, end = draw.choice(values)
        return data[:start] + draw.choice(VALUES) + data[end:]
    filler = {
        4: b"",
        5: draw.randbytes(end - start),
        6: draw.choice(PIECES) * draw.choice([1, 1, 50]),
    }
    return data[:start] + filler.get(kind, data[start:end] * 3) + data[end:]


def write_texts(folder: Path, pairs: int = 40) -> None:
    """The same pairs in every format of parallel text."""
    rows = [
        (f"Satz {n} über „das“ da", f"sentence {n} on “the” there\u2028!") for n in range(pairs)
    ]
    table = "".join(f"{source}\t{target}\n" for source, target in rows).encode()
    left, right = ("".join(f"{text}\n" for text in side).encode() for side in zip(*rows))
    files = {
        "de-en.tsv": table,
        "sw-en.tsv.gz": gzip.compress(table),
        "tr-en.tsv.xz": lzma.compress(table) * 2,
    }
    files |= {
        "a.fr": left,
        "a.en": right,
        "b.ru.xz": lzma.compress(left),
        "b.en.gz": gzip.compress(right),
    }
    records = [{"source": source, "target": target} for source, target in rows]
    files["el-en.jsonl"] = "".join(
        json.dumps(record, ensure_ascii=False) + "\n" for record in records
    ).encode()
    unit = '<tu><tuv xml:lang="it"><seg>{}</seg></tuv><tuv xml:lang="en"><seg>{}</seg></tuv></tu>'
    units = "".join(unit.format(*row) for row in rows)
    files["m.tmx"] = f'<?xml version="1.0"?><tmx version="1.4"><body>{units}</body></tmx>'.encode()
    head = (
        'msgid ""\nmsgstr ""\n"Language: af\\n"\n"Content-Type: text/plain; charset=UTF-8\\n"\n\n'
    )
    files["c.po"] = (head + "".join(f'msgid "{b}"\nmsgstr "{a}"\n\n' for a, b in rows)).encode()
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    with zipfile.ZipFile(folder / "en-es.txt.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("d.es", left)
        archive.writestr("d.en", right)
    pq.write_table(pa.Table.from_pylist(records), folder / "bg-en.parquet")


# ----------------------------------------------------------------------------------------------- readers


def read_damaged(folder: Path, case: int) -> str:
    """Damages one file of a folder, reads what is in it, and mends the file; "read" or "refused".

    Raises:
        AssertionError: a line that is counted neither as a pair nor as a bad one, or a refusal without a file's name.
        Exception: anything that a reader raises but `UserError` and `FileNotFoundError`.
    """
    draw = random.Random(case)
    files = sorted(folder.iterdir())
    path = draw.choice(files)
    whole = path.read_bytes()
    hurt = damaged(whole, [file.read_bytes() for file in files], draw)
    path.write_bytes(hurt)
    try:
        for file in (file for found in find_bitext(path).values() for file in found):
            audit = LineAudit(file, 1.0)
            pairs = sum(map(len, read_tables(file, audit)))
            if file.format in ("tsv", "jsonl", "moses", "parquet"):
                assert pairs + audit.bad == audit.lines, (
                    f"{pairs} pairs and {audit.bad} bad lines of {audit.lines}"
                )
                assert file.format == "parquet" or audit.lines == count_lines(
                    Path(file.paths[0])
                ), "lines are lost"
    except (UserError, FileNotFoundError) as error:
        if folder.name not in str(error):
            raise AssertionError(f"names no file: {error}") from error
        return "refused"
    finally:
        assert path.read_bytes() == hurt, f"{path} has changed"
        path.write_bytes(whole)
    return "read"


def count_lines(path: Path) -> int:
    """The lines of a file or of an archive's member, by the plainest means."""
    if path.parent.suffix == ".zip":
        with zipfile.ZipFile(path.parent) as archive:
            data = archive.read(path.name)
    else:
        unpack = {
            ".gz": gzip.decompress,
            ".xz": lambda data: lzma.decompress(data.rstrip(b"\0")),
        }  # padding
        data = unpack.get(path.suffix, bytes)(path.read_bytes())
    data = data.removeprefix(b"\xef\xbb\xbf")
    return data.count(b"\n") + (not data.endswith(b"\n") and data != b"")


# ---------------------------------------------------------------------------------------------- commands


def write_inputs(folder: Path) -> None:
    """What the commands read, in folders and files of a name each."""
    import torch
    from transformers import BertConfig, BertModel

    from benchmarks.workload import word_tokenizer
    from dap.encoding import SentenceEncoder
    from dap.publishing import write_modules
    from dap.reports import report
    from modeling_dap import DAPConfig, DAPForPreTraining

    write_texts(folder / "text")
    tokenizer = word_tokenizer(
        ["Satz", "über", "sentence", *map(str, range(40))], model_max_length=32
    )
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=160, **shape)
    heads = {"mask_token_id": tokenizer.mask_token_id, "rtl_layers": 1, "target_vocab_size": 9}
    ours = DAPForPreTraining(DAPConfig(config, **heads))
    for name, model in {"model": BertModel(config), "dap": ours}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    write_modules(
        SentenceEncoder(ours.dap, tokenizer, prefix="query: ", max_seq_length=32), folder / "dap"
    )
    (folder / "dap" / "run.json").write_text(
        '{"learning_rate": 0.1, "training text": {"de": "9 pairs, 0"}}'
    )
    (folder / "dap" / "trainer_state.json").write_text(
        '{"global_step": 9, "log_history": [{"step": 1, "loss": 2.0}]}'
    )
    (folder / "licences.json").write_text('{"de-en.tsv": "CC0", "a.fr": "unknown"}\n')
    (folder / "test").mkdir()
    (folder / "test" / "plain.txt").write_text("a sentence\nanother one\twith two parts\n")
    (folder / "test" / "records.jsonl").write_text(
        '{"premise": "one", "choices": ["two", "three"]}\n'
    )
    (folder / "xnli").mkdir()
    for split, code in (("train", "en"), ("dev", "en"), ("test", "en"), ("test", "de")):
        labels = ("entailment", "neutral", "contradiction") * 20
        lines = "".join(f"premise {n}\thypothesis {n}\t{label}\n" for n, label in enumerate(labels))
        (folder / "xnli" / f"{split}-{code}.tsv").write_text(lines)
    recipe = (
        "train_data: text\ndev_pairs: 2\nobjective: tr+rtl\nrtl_layers: 1\nlearning_rate: 0.001\n"
    )
    (folder / "recipe.yaml").write_text(recipe)
    numbers = {"languages": {"de": {"pairs": 3, "xx-en": 50.0, "en-xx": 25.0}}}
    for seed, name in enumerate(("run.json", "other.json")):
        (folder / name).write_text(
            json.dumps(report("model", "retrieval", numbers, {}, 1.0, seed=seed))
        )


def run_damaged(pristine: Path, folder: Path, case: int) -> tuple[str, str, str]:
    """Runs one command on a damaged copy of its inputs: its name, how it ended, and what it printed last."""
    draw = random.Random(case)
    shutil.copytree(pristine, folder / "in")
    os.chdir(folder / "in")
    command = draw.choice(COMMANDS)
    named = [Path(word) for word in command.split() if Path(word).exists()]
    files = sorted(file for path in named for file in [path, *path.rglob("*")] if file.is_file())
    path = draw.choice(files)
    data = path.read_bytes()
    if draw.random() < 0.05:
        path.unlink()
        draw.choice(
            [lambda: path.symlink_to("absent"), path.mkdir, lambda: path.symlink_to(path.name)]
        )()
    else:
        path.write_bytes(
            damaged(data, [file.read_bytes() for file in files if file != path] or [b""], draw)
        )
    before = contents(Path())
    end, text = run_forked(command, folder)
    after = {path: data for path, data in contents(Path()).items() if path.parts[0] != "out"}
    if after != before:
        end, text = (
            "WRITES OUTSIDE",
            " ".join(sorted(map(str, dict(after.items() ^ before.items())))),
        )
    return command.split()[0], end, f"{path}: {text}"


def contents(folder: Path) -> dict[Path, bytes | None]:
    """The files below a folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def start(command: str, printed: Path, limit: int = 120) -> int:
    """The id of a process that runs a command, with what it prints in a file; it ends after `limit` seconds."""
    if pid := os.fork():
        return pid
    status = 3
    try:
        handle = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        signal.alarm(limit)
        resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
        import_module("datasets").config.HF_DATASETS_CACHE = printed.parent / "cache"
        name, *arguments = command.split()
        import_module(name).main(arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1 if "\n" not in str(end.code) else 4
        print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def prepare(commands: Sequence[str], base: Path) -> Path:
    """Imports what the commands need, and writes their inputs into a folder, in a process of its own."""
    logging.disable(logging.WARNING)
    for command in commands:
        import_module(command.split()[0])
    if (
        pid := os.fork()
    ) == 0:  # Arrow's and torch's threads would not live on in what is forked later
        write_inputs(base / "pristine")
        os._exit(0)
    os.waitpid(pid, 0)
    return base / "pristine"


def run_forked(command: str, folder: Path) -> tuple[str, str]:
    """How a command ends in a process of its own, and the last of what it printed."""
    printed = folder / "printed"
    status = os.waitstatus_to_exitcode(os.waitpid(start(command, printed), 0)[1])
    text = printed.read_text(errors="replace").strip() if printed.exists() else ""
    ends = {
        0: "done",
        1: "refused",
        2: "refused",
        4: "MORE THAN ONE LINE",
        -signal.SIGALRM: "NO END",
    }
    return ends.get(status, "TRACEBACK" if status == 3 else f"DIED {status}"), text[-2000:]


def main() -> None:
    """Damages and runs until the time is over; prints what ended badly, and a table of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--cases", type=int, default=10**9, help="end after so many, if the time is not over before"
    )
    args = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(prefix="dap-fuzz-") as name:
        base = Path(name)
        pristine = prepare(COMMANDS, base)
        until = time.monotonic() + 60 * args.minutes
        for case in range(args.first, args.first + args.cases):
            if time.monotonic() > until:
                break
            command, end, text = run_damaged(pristine, base / "case", case)
            counts[command, end] += 1
            if end not in ("done", "refused") or args.cases == 1:
                print(f"case {case}: {command}: {end}: {text}\n", flush=True)
            os.chdir(base)
            shutil.rmtree(base / "case")
        if args.cases > 1:
            read_in_turn(base / "readers", args.first, counts)
    print(
        "".join(
            f"{count:>8}  {command:<20} {end}\n" for (command, end), count in sorted(counts.items())
        )
    )


def read_in_turn(
    folder: Path, first: int, counts: Counter[tuple[str, str]], cases: int = 5000
) -> None:
    """`read_damaged`, counted."""
    write_texts(folder)
    for case in range(first, first + cases):
        try:
            counts["readers", read_damaged(folder, case)] += 1
        except Exception as error:
            counts["readers", "WRONG"] += 1
            print(f"readers, case {case}: {type(error).__name__}: {one_line(error)}", flush=True)


def go_offline() -> None:
    """Starts this program anew, with one thread, without a network and with a cache of its own."""
    if "HF_HUB_OFFLINE" not in os.environ:
        settings = {"HF_HUB_OFFLINE": "1", "HF_HOME": tempfile.mkdtemp(), "OMP_NUM_THREADS": "1"}
        os.execve(
            sys.executable, sys.orig_argv, os.environ | settings | {"ACCELERATE_USE_CPU": "true"}
        )


if __name__ == "__main__":
    go_offline()
    main()
