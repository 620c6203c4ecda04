#!/usr/bin/env bash
# Correctness of the fast paths and every benchmark that a GPU is for, in under 8 minutes on an H100, from any folder:
#
#     bash benchmarks/gpu.sh                      # DEVICE=cpu TINY=1: a dry run; OUT=folder keeps the JSON files
#
# Needs a Python with torch and Transformers (PYTHON, default python3); the project need not be installed. Where pytest,
# sentence-transformers or datasets is missing, what needs it is skipped with a message.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cuda}
OUT=${OUT:-$(mktemp -d)}
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 TOKENIZERS_PARALLELISM=false

failed=0
if [ -n "${TINY:-}" ]; then
    echo "correctness: left to the test suite in a dry run"
elif ! "$PYTHON" -c "import pytest" 2>/dev/null; then
    echo "correctness: skipped, pytest is not installed for $PYTHON"
else
    # only files of the model: the others import libraries that such a machine may lack
    files=()
    for file in tests/test_{encoder_dap,losses_dap,modeling_dap}.py; do
        [ -e "$file" ] && files+=("$file")
    done
    timeout 110 "$PYTHON" -m pytest -q -x -o addopts= -p no:cacheprovider -k "cuda or pack or fused or compile" "${files[@]}"
    outcome=$?
    [ $outcome -eq 5 ] && echo "correctness: no test of ${files[*]} is about a fast path" # pytest's code for 'nothing ran'
    [ $outcome -ne 0 ] && failed=1
fi

timeout -k 20 340 "$PYTHON" -m benchmarks.gpu --device "$DEVICE" --folder "$OUT" ${TINY:+--tiny} || failed=1
exit $failed
