#!/usr/bin/env bash
# What does a training change in search? Train TR with and without the anchor, three seeds each, and
# measure question sets, retrieval and the multilingual pool. `make quickstart` comes first.
#
#   python -m study.question_sets build/questions
#   bash study/search.sh NAME TEXT/ STEPS     # such as: software build/quickstart/train 44
#   python -m study.search_table build/search/ --output search.json
#
# METHODS and SEEDS choose some of the runs. A finished run is not repeated. RECIPE and FLAGS change how it trains:
#   RECIPE=quickstart FLAGS= bash study/search.sh quick build/quickstart/train 60
#   METHODS=tr+rtl+distill FLAGS="--dev_pairs 20 --bf16 --head_learning_rate 3e-4" bash study/search.sh software ...
set -euo pipefail
name=$1 text=$2 steps=$3
start=build/quickstart/encoder
out=build/search
mkdir -p "$out/training"

measure() {  # MODEL REPORT
  [ -e "$out/$2.json" ] || eval-retrieval --model "$1" --search build/questions/*-* \
    --data_dir build/quickstart/test --pool multilingual --hard_negatives --bf16 \
    --output_file "$out/$2.json"
}

measure "$start" start
for seed in ${SEEDS:-0 1 2}; do
  for method in ${METHODS:-tr tr+distill}; do
    run=${method}_$name-${steps}_$seed
    [ -e "$out/$run.json" ] && continue
    # shellcheck disable=SC2086
    train-dap "${RECIPE:-finetune}" --model_name_or_path "$start" --objective "$method" --train_data "$text" \
      --max_steps "$steps" --seed "$seed" ${FLAGS---dev_pairs 20 --bf16} --use_cpu --output_dir "$out/$run"
    cp "$out/$run/train_results.json" "$out/training/$run.json"
    measure "$out/$run" "$run"
    rm -r "${out:?}/$run"
  done
done
