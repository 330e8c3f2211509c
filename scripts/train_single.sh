#!/usr/bin/env bash
# ViT-B/16 on one GPU in mixed precision, from a folder with train/ and val/. Further flags are passed on:
#   DATA=/data/imagenet bash scripts/train_single.sh -batch_size 128 -epochs 90
set -euo pipefail
cd "$(dirname "$0")/.."
CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}" \
python main_single_gpu.py \
    -cfg configs/vit_base_patch16_224.yaml \
    -dataset imagenet2012 \
    -data_path "${DATA:-/dataset/imagenet}" \
    -batch_size 256 \
    -amp "$@"
