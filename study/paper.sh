#!/usr/bin/env bash
# The paper's comparison at full size, for a machine with 8 GPUs. We have not run it.
# By the paper's own costs it takes about 1,400 hours of a machine with 8 V100.
#
#   prepare-data --opus all --download_dir raw --evaluation_data data/tatoeba data/bucc --output_dir data/corpus
#   bash study/paper.sh data runs
#
# The first argument is a folder with corpus/train, corpus/dev, tatoeba/, bucc/, xnli/ and mnli.tsv.
# Give the same command again after a stop: finished trainings end at once.
set -euo pipefail
data=$1
runs=$2

train() {  # name, recipe, further flags
  for seed in 0 1 2; do
    accelerate launch --multi_gpu --num_processes 8 train_dap.py "$2" \
      --train_data "$data/corpus/train" --validation_data "$data/corpus/dev" \
      --seed "$seed" --bf16 --output_dir "$runs/$1-$seed" "${@:3}"
    evaluate "$1-$seed"
  done
}

evaluate() {  # name of a trained model
  local model="$runs/$1"
  # Tables 1, 7 and 8
  eval-retrieval --model "$model" --data_dir "$data/tatoeba" --max_seq_length 32 \
    --output_file "$model/tatoeba.json"
  # Tables 2 and 3
  for protocol in sample sample-threshold-on-training; do
    eval-retrieval --model "$model" --bucc "$data"/bucc/{fr,de,ru,zh}-en --bucc_protocol "$protocol" \
      --max_seq_length 32 --output_file "$model/bucc-$protocol.json"
  done
  # Table 4
  run-xnli --model_name_or_path "$model" --data_dir "$data/xnli" --train_data "$data/mnli.tsv" \
    --search --output_dir "$model-xnli"
}

for encoder in mbert xlmr; do
  train "$encoder-dap" "$encoder"
  train "$encoder-tr" "$encoder" --objective tr
  train "$encoder-tlm" "$encoder" --objective tr+tlm
done
# Table 5
train direction-reverse mbert --rtl_direction target-to-source
train direction-both mbert --rtl_direction both
# Figure 3
for ratio in 0.25 0.5 0.75; do
  train "ratio-$ratio" mbert --rtl_ratio "$ratio"
done
# Figure 4
for layers in 1 3 4; do
  train "layers-$layers" mbert --rtl_layers "$layers"
done
# Table 6
python -m benchmarks.flops --device cuda --size base --batch_size 512 --bf16 --repeats 5
