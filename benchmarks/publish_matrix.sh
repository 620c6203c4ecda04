#!/usr/bin/env bash
# Does a published checkpoint load, without this project, by the oldest and the newest Transformers?
#
#     benchmarks/publish_matrix.sh                     # builds both environments in build/matrix (MATRIX_DIR)
#     benchmarks/publish_matrix.sh PYTHON [PYTHON...]  # in environments that are there, with torch and transformers
#
# OLD=5.17.* and OLD_TORCH=2.8.0 choose the older one; the newer has the torch of constraints.txt. Not part of the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
project=${PROJECT_PYTHON:-.venv/bin/python}
build=$(realpath -m "${MATRIX_DIR:-build/matrix}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_HOME="$work/hf" ACCELERATE_USE_CPU=true

if [ $# -eq 0 ]; then
    newest_torch=$(grep '^torch==' constraints.txt)
    for place in old new; do [ -d "$build/$place" ] || python3 -m venv "$build/$place"; done
    "$build/old/bin/pip" install --quiet "transformers==${OLD:-5.17.*}" "torch==${OLD_TORCH:-2.8.0}"
    "$build/new/bin/pip" install --quiet --upgrade --upgrade-strategy only-if-needed transformers "$newest_torch"
    set -- "$build/old/bin/python" "$build/new/bin/python"
fi

# A checkpoint of each encoder class, published --with_heads and as --layout dap, and the vectors it should give.
PYTHONPATH=tests:. "$project" - "$work" <<'PYTHON'
import sys
from pathlib import Path

import conftest
import numpy as np
import torch
from tiny_models import ENCODERS, tiny_model

from dap.encoding import SentenceEncoder
from dap.publishing import Options, build

work = Path(sys.argv[1])
fixture = conftest.tiny_tokenizer
tokenizer = getattr(fixture, "_get_wrapped_function", lambda: fixture.__wrapped__)()()
for name in ENCODERS:
    checkpoint = work / "checkpoints" / name
    tiny_model(name, pooling="mean").save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    build(checkpoint, work / "plain" / name, Options(with_heads=True))
    build(checkpoint, work / "dap" / name, Options(layout="dap"))
    vectors = SentenceEncoder.from_pretrained(str(checkpoint)).encode(["kaban loder", "mifin pugol kaban nebder"])
    np.save(work / f"{name}.npy", vectors)
PYTHON

cat > "$work/stranger.py" <<'PYTHON'
import sys
from pathlib import Path

OWN = {"dap", "modeling_dap", "heads_dap", "encoder_dap", "losses_dap"}
OWN |= {"configuration_dap"}


class Blocker:  # in case the project is installed in this environment
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OWN:
            raise ImportError(f"{name} is blocked")


sys.meta_path.insert(0, Blocker())
import numpy as np
import torch
import transformers
from transformers import AutoModel, AutoModelForPreTraining, AutoTokenizer
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
work, failed = Path(sys.argv[1]), 0
print(f"transformers {transformers.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")


def vectors(model, folder, pooled):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["kaban loder", "mifin pugol kaban nebder"], padding=True, return_tensors="pt")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        out = model.eval()(**inputs)
    if pooled:
        return out.pooler_output.numpy()
    mask = batch["attention_mask"].unsqueeze(-1)
    return ((out.last_hidden_state * mask).sum(1) / mask.sum(1)).numpy()


for file in sorted(work.glob("*.npy")):
    name, expected = file.stem, np.load(file)
    plain, root = work / "plain" / name, work / "dap" / name
    code = {"subfolder": "pretraining", "trust_remote_code": True}
    ways = {
        "plain": lambda: vectors(AutoModel.from_pretrained(plain), plain, False),
        "pretraining/": lambda: vectors(AutoModel.from_pretrained(plain, **code), plain, True),
        "layout dap": lambda: vectors(AutoModel.from_pretrained(root, trust_remote_code=True), root, True),
        "heads": lambda: vectors(AutoModelForPreTraining.from_pretrained(plain, **code).dap, plain, True),
    }
    for way, load in ways.items():
        try:
            difference = np.abs(load() - expected).max() / np.abs(expected).max()
            result = f"same vectors (largest difference {difference:.0e})" if difference < 1e-5 else f"OTHER VECTORS, by {difference:.0e}"
        except Exception as error:
            result = f"FAILED: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
        failed += not result.startswith("same")
        print(f"  {name:<12} {way:<13} {result}")
sys.exit(1 if failed else 0)
PYTHON

status=0
for python in "$@"; do
    [ "${python%/*}" = "$python" ] || python=$(cd "${python%/*}" && pwd)/${python##*/}  # the loop changes the folder
    (cd "$work" && "$python" -I stranger.py "$work" 2> "$work/errors") || { status=1; tail -5 "$work/errors"; }
done
exit $status
