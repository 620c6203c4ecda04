#!/usr/bin/env bash
# Run everything that waits for a GPU, in parts of ten minutes. Call it again and again: it continues
# where it was, until it prints "all is done".
#   ENCODER=e5 DATA=../shared/data OUT=out experiments/gpu.sh [SECONDS]
# The first call runs benchmarks/gpu.py, the next ones experiments/recipes/gpu.yaml. JSON files go to
# $OUT/benchmarks and $OUT/results.
set -eu
python=${PYTHON:-python3} root=$(cd "$(dirname "$0")/.." && pwd) out=$(realpath -m "$OUT")
places=("encoder=$(realpath "$ENCODER")" "data=$(realpath "$DATA")" "heads=$out/runs/gpu/heads-lr0.001/seed-0"
  "bow_heads=$out/runs/gpu/bow-heads-lr0.001/seed-0")
cd "$root"
if [ ! -d "$out/benchmarks" ]; then
  "$python" -m benchmarks.gpu --folder "$out/benchmarks" || echo "a benchmark failed: see above"
  exit
fi
study=("$python" -m experiments.run experiments/recipes/gpu.yaml --places "${places[@]}" --output_dir "$out/runs" --results_dir "$out/results")
timeout --signal=INT "${1:-560}" "${study[@]}" || echo "stopped: call this again"
"${study[@]}" --list | tee "$out/state.txt"
grep -qv ': done$' "$out/state.txt" || echo "all is done"
