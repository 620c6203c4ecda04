"""The same vectors in every client: cosines of a published folder's vectors to `SentenceEncoder`'s of the checkpoint.

    python -m benchmarks.clients
    python -m benchmarks.clients --install build/clients --json clients.json

A small XLM-R of random weights is published in both layouts, with the first token or the mean, with and without a
prefix. Each client runs in a process of its own, with nothing of this project to import but where its name is ours. A
cell is the smallest cosine over the sentences, one of which is cut. `--install` adds the clients that need an
environment of their own, made there from PyPI with the torch of constraints.txt.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, XLMRobertaConfig

from dap.encoding import SentenceEncoder
from dap.files import write_json
from dap.publishing import LAYOUTS, Options, build
from dap.publishing.onnx_export import export
from dap.reports import text_table
from modeling_dap import DAPConfig, DAPForPreTraining

ROOT = Path(__file__).resolve().parent.parent
SENTENCES = ["Guten Morgen!", "Where is the station?", "Keitto on liian kuumaa.", "eins zwei drei " * 100]
LENGTH = 32  # tokens, which the last sentence exceeds
PREFIX = "query: "
#: Environment -> what pip installs there; "" is the one that this runs in.
ENVIRONMENTS = {
    "fastembed": ["fastembed"],
    "infinity": ["infinity-emb[all]"],
    "txtai": ["txtai"],
    "optimum": ["sentence-transformers", "optimum-onnx[onnxruntime]"],
}
AUTO = """
import torch
from transformers import AutoModel, AutoTokenizer
batch = AutoTokenizer.from_pretrained(folder)(texts, padding=True, truncation=True, return_tensors="pt")
with torch.no_grad():
    out = AutoModel.from_pretrained(folder, trust_remote_code=dap)(**batch)
"""
POOLED = "if out.get('pooler_output') is None or not out.pooler_output.any(): refuse('no vector in pooler_output')\n"
MEAN = "mask = batch['attention_mask'].unsqueeze(-1)\nmean = (out.last_hidden_state * mask).sum(1) / mask.sum(1)\n"
LIBRARY = "from sentence_transformers import SentenceTransformer\n"
LIBRARY += "model = SentenceTransformer(folder, device='cpu', trust_remote_code=dap, backend={backend!r})\n"
#: Client -> its environment, and code that makes `vectors` of `sentences`, or of `texts`, which begin with the prefix.
CLIENTS = {
    "AutoModel, pooler_output": ("", AUTO + POOLED + "vectors = out.pooler_output"),
    "AutoModel, last_hidden_state": ("", AUTO + MEAN + "vectors = mean if is_mean else out.last_hidden_state[:, 0]"),
    "SentenceEncoder": (
        "",
        f"sys.path.insert(0, {str(ROOT)!r})\nfrom dap.encoding import SentenceEncoder\n"
        "vectors = SentenceEncoder.from_pretrained(folder).encode(sentences)",
    ),
} | {
    f"sentence-transformers, {name}": ("", LIBRARY.format(backend="torch") + f"vectors = model.{name}(sentences)")
    for name in ("encode", "encode_query", "encode_document")
}
CLIENTS |= {
    "onnxruntime": (
        "",
        "import onnxruntime\nfrom transformers import AutoTokenizer\n"
        "batch = AutoTokenizer.from_pretrained(folder)(texts, padding=True, truncation=True, return_tensors='np')\n"
        "session = onnxruntime.InferenceSession(folder + '/onnx/model.onnx')\n"
        "vectors = session.run(['sentence_embedding'], {i.name: batch[i.name] for i in session.get_inputs()})[0]",
    ),
    "sentence-transformers, ONNX": ("optimum", LIBRARY.format(backend="onnx") + "vectors = model.encode(sentences)"),
    "fastembed": (
        "fastembed",
        "from fastembed import TextEmbedding\n"
        "from fastembed.common.model_description import ModelSource, PoolingType\n"
        "TextEmbedding.add_custom_model(model=folder, pooling=PoolingType.MEAN if is_mean else PoolingType.CLS, "
        "normalization=True, sources=ModelSource(url='https://none'), dim=64, model_file='onnx/model.onnx')\n"
        "vectors = list(TextEmbedding(folder, specific_model_path=folder).embed(texts))",
    ),
    "infinity": (
        "infinity",
        "import asyncio\nfrom infinity_emb import AsyncEmbeddingEngine, EngineArgs\n"
        "args = EngineArgs(model_name_or_path=folder, engine='torch', device='cpu', dtype='float32', "
        "model_warmup=False, bettertransformer=False, trust_remote_code=dap)\n"
        "async def serve():\n    engine = AsyncEmbeddingEngine.from_args(args)\n    async with engine:\n"
        "        return (await engine.embed(texts))[0]\nvectors = asyncio.run(serve())",
    ),
    "txtai": (
        "txtai",
        "from txtai import Embeddings\nmore = {'vectors': {'trust_remote_code': True}} if dap else {}\n"
        "vectors = Embeddings(path=folder, gpu=False, **more).batchtransform(sentences)",
    ),
}
RUNNER = """
import json, sys
class Refused(Exception):
    pass
def refuse(reason):
    raise Refused(reason)
answers = []
for folder, sentences, texts, dap, is_mean in json.loads(sys.argv[1]):
    names = dict(globals())
    try:
        exec(sys.argv[2], names)
        answers.append([[float(value) for value in vector] for vector in names["vectors"]])
    except Exception as error:
        kind = "" if isinstance(error, Refused) else type(error).__name__ + ": "
        answers.append("refused: " + kind + " ".join(str(error).split())[:160])
json.dump(answers, open(sys.argv[3], "w"))
"""


def checkpoint(folder: Path, pooling: str) -> Path:
    """A DAP checkpoint of a small XLM-R with random weights, and a tokenizer of letters."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer.train_from_iterator([*SENTENCES, PREFIX], trainers.BpeTrainer(vocab_size=90, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token", "mask_token"), special, strict=True))
    names |= {"cls_token": "<s>", "sep_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names).save_pretrained(folder)
    shape = {"vocab_size": len(special) + 90, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = XLMRobertaConfig(**shape, intermediate_size=128, max_position_embeddings=514, pad_token_id=1)
    model = DAPForPreTraining(DAPConfig(config, pooling=pooling, mask_token_id=4))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else parameter.data.add_(0.1)
    model.save_pretrained(folder)
    return folder


def install(folder: Path) -> dict[str, str]:
    """Environment -> its Python; made in `folder` unless it is there."""
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    for name, packages in ENVIRONMENTS.items():
        pip = [folder / name / "bin/python", "-m", "pip", "--quiet"]
        if not pip[0].exists():
            subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
            subprocess.run([*pip, "install", pinned, *packages], check=True)
            subprocess.run([*pip, "uninstall", "--yes", "torchvision"], check=True)  # not built for that torch
    return {name: str((folder / name).absolute() / "bin/python") for name in ENVIRONMENTS}


def answers(python: str, code: str, jobs: list[list]) -> list[list | str]:
    """What a client says of each job: its vectors (N, D), or why it gives none."""
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    blank = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory(prefix="dap-hf-") as home:
        file = Path(home, "answers.json")  # as clients print what they like
        command = [python, "-I", "-c", RUNNER, json.dumps(jobs), code, str(file)]
        done = subprocess.run(command, env=blank | own | {"HF_HOME": home}, capture_output=True, text=True)
        if not file.exists():
            return [f"refused: {done.stderr.strip().splitlines()[-1][:160]}"] * len(jobs)
        return json.loads(file.read_text())


def cosine(found: list | str, expected: np.ndarray) -> float | str:
    """The smallest cosine of rows to the expected ones (N, D); a refusal stays."""
    if isinstance(found, str):
        return found
    vectors, expected = np.array(found), expected.astype(np.float64)
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((vectors * expected).sum(1) / lengths).min())


def compare(work: Path, pythons: dict[str, str]) -> dict[str, dict[str, float | str]]:
    """Client -> layout, pooling and prefix -> `cosine`; clients without an environment are left out."""
    jobs, expected = [], {}
    for layout, pooling, prefix in product(LAYOUTS, ("cls", "mean"), ("", PREFIX)):
        column = f"{layout} {pooling} {'prefix' if prefix else 'none'}"
        source, folder = checkpoint(work / f"{column} checkpoint", pooling), work / column.replace(" ", "-")
        build(source, folder, Options(layout=layout, prefix=prefix, max_seq_length=LENGTH))
        export(folder)
        encoder = SentenceEncoder.from_pretrained(str(source), prefix=prefix, max_seq_length=LENGTH)
        expected[column] = encoder.encode(SENTENCES)
        texts = [prefix + text for text in SENTENCES]
        jobs.append([str(folder), SENTENCES, texts, layout == "dap", pooling == "mean"])
    found = {name: answers(pythons[env], code, jobs) for name, (env, code) in CLIENTS.items() if env in pythons}
    return {
        name: {column: cosine(one, expected[column]) for column, one in zip(expected, given, strict=True)}
        for name, given in found.items()
    }


def table(found: dict[str, dict[str, float | str]]) -> str:
    """A line for each client and a column for each way to publish; the reasons of refusals below."""
    columns = list(next(iter(found.values())))
    reasons = list(
        dict.fromkeys(value for cells in found.values() for value in cells.values() if isinstance(value, str))
    )
    rows = [
        [name, *(f"[{reasons.index(v) + 1}]" if isinstance(v, str) else f"{v:.4f}" for v in cells.values())]
        for name, cells in found.items()
    ]
    notes = [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([text_table(["cosine to SentenceEncoder", *columns], rows), *notes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--install", type=Path, help="folder of environments, made if they are not there")
    parser.add_argument("--json", help="write the numbers here")
    args = parser.parse_args()
    pythons = {"": sys.executable} | (install(args.install) if args.install else {})
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="dap-clients-") as work:
        found = compare(Path(work), pythons)
    print(table(found))
    if args.json:
        write_json(found, args.json)


if __name__ == "__main__":
    main()
