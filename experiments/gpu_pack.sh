#!/usr/bin/env bash
# Prepare what a bare GPU machine without a network needs, in folders that git ignores:
#   .whl/    packages that such a machine often lacks, for its Python (default: 3.12)
#   .gpu/    the shape and tokenizer of the new encoder, the evaluation text, the commit
#   .train/  the training text
# Then print how much travels with each command, and the commands.
#   DATA=data ENCODER=e5 experiments/gpu_pack.sh      # with a network, from any folder
# DATA has train/ and tatoeba/. ENCODER is a folder with a Unigram tokenizer, such as E5's.
set -euo pipefail
python=${PYTHON:-python3} limit=${LIMIT_MIB:-63}
data=$(realpath "$DATA") encoder=$(realpath "$ENCODER")
cd "$(dirname "$0")/.."
ignored=$(git rev-parse --git-path info/exclude)
for name in .whl .gpu .train; do
  grep -qsx "/$name/" "$ignored" || echo "/$name/" >>"$ignored"
  mkdir -p "$name"
done
wanted=(datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 python-xz==0.7.0 polib==1.2.0)
[ -n "$(ls .whl)" ] || "$python" -m pip download -q --no-deps --only-binary=:all: \
  --python-version "${PYTHON_THERE:-3.12}" --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -d .whl "${wanted[@]}"
[ -f .gpu/shape/config.json ] || "$python" -m experiments.new_encoder --tokenizer "$encoder" \
  --train_data "$data/train" --vocab_size 32000 --hidden_size 384 --num_hidden_layers 6 \
  --output_dir .gpu/shape
tar -cJf .gpu/eval.tar.xz -C "$data" tatoeba
git rev-parse HEAD >.gpu/commit
cp -f "$data"/train/* .train/
tree=$(git ls-files -z --cached --others --exclude-standard | xargs -0 du -cb | tail -1 | cut -f1)
for call in ".whl" ".whl .gpu .train"; do
  size=$((tree + $(du -cb $call | tail -1 | cut -f1)))
  echo "carry $call: $((size >> 20)) MiB of at most $limit"
  [ "$size" -lt $((limit << 20)) ] || { echo "too much"; exit 1; }
done
cat <<'END'
Commands for the machine, in the repository's root. RESULTS is a folder that comes back.
First line of each:
  python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/site-packages .whl/*.whl
  export PYTHONPATH=/tmp/site-packages PYTHONUNBUFFERED=1; set -o pipefail
Benchmarks (carry .whl):
  benchmarks/gpu.sh --archive RESULTS/bench.tar.xz 2>&1 | tee RESULTS/bench.log
Study (carry .whl .gpu .train; again until it prints "all is done"):
  mkdir -p /tmp/d; tar -xJf .gpu/eval.tar.xz -C /tmp/d; [ -d /tmp/d/train ] || cp -r .train /tmp/d/train
  SHAPE=.gpu/shape DATA=/tmp/d FOLDER=/tmp/study experiments/gpu.sh 480 2>&1 | tee RESULTS/study.log
  cp /tmp/study/results.tar.xz RESULTS/
END
