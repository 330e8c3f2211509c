#!/usr/bin/env bash
# From a fresh clone to a trained Vision Transformer: installs, trains on handwritten digits, shows where the plots are.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
enter_environment requirements.txt
python main_single_gpu.py -cfg configs/vit_digits.yaml -amp "$@"
