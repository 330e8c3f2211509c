#!/usr/bin/env bash
# ViT-B/16 on all visible GPUs of one machine, in mixed precision. Further flags are passed on:
#   CUDA_VISIBLE_DEVICES=0,1,2,3 DATA=/data/imagenet bash scripts/train_multi.sh -batch_size 512
set -euo pipefail
cd "$(dirname "$0")/.."
python main_multi_gpu.py \
    -cfg configs/vit_base_patch16_224.yaml \
    -dataset imagenet2012 \
    -data_path "${DATA:-/dataset/imagenet}" \
    -batch_size 256 \
    -amp "$@"
