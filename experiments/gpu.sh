#!/usr/bin/env bash
# Run experiments/recipes/gpu.yaml on one GPU, in parts of at most SECONDS (default: 480). Call it
# again until it prints "all is done": it continues with the run at which it was stopped.
#   SHAPE=.gpu/shape DATA=data FOLDER=/tmp/gpu-study experiments/gpu.sh [SECONDS]
# Results, logs and the state of all runs are packed into FOLDER/results.tar.xz at the end.
set -euo pipefail
python=${PYTHON:-python3} root=$(cd "$(dirname "$0")/.." && pwd) folder=$(realpath -m "$FOLDER")
places=("shape=$(realpath "$SHAPE")" "data=$(realpath "$DATA")"
  "encoder=$folder/runs/gpu/mlm-lr0.0005/seed-0")
mkdir -p "$folder"
cd "$root"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=true
"$python" -c 'import sys; from benchmarks.gpu import preflight
sys.exit("datasets" in preflight())' || { echo "a package is missing: see above"; exit 1; }
study=("$python" -m experiments.run "${RECIPE:-experiments/recipes/gpu.yaml}" --places "${places[@]}"
  --output_dir "$folder/runs" --results_dir "$folder/results")
[ ! -f .gpu/commit ] || cp .gpu/commit "$folder/commit"
status=0
timeout --signal=INT "${1:-480}" "${study[@]}" || status=$?
"${study[@]}" --list | tee "$folder/state.txt"
(cd "$folder" && find . -name '*.log' -o -name '*.json' -path './results/*' \
  -o -name '*-probe.json' -o -name state.txt -o -name commit | tar -cJf results.tar.xz -T -)
for result in "$folder"/results/*/*/*.json; do
  [ ! -e "$result" ] || "$python" -c 'import json, sys; found = json.load(open(sys.argv[1]))
del found["curve"]; print(json.dumps(found))' "$result"
done
if grep -qv ': done$' "$folder/state.txt"; then
  echo "not done (status $status): call this again"
  exit 1
fi
echo "all is done: $folder/results.tar.xz"
