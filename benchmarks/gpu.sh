#!/usr/bin/env bash
# Everything that waits for a GPU, from anywhere: checks first, then speed and memory. Options are those of gpu.py.
cd "$(dirname "$0")/.." && HF_HUB_OFFLINE=1 exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
