#!/usr/bin/env bash
# Run the checks and benchmarks that need a GPU, from any folder. Options are those of gpu.py.
cd "$(dirname "$0")/.." && HF_HUB_OFFLINE=1 exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
