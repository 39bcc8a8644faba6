#!/usr/bin/env bash
# Four GPUs: parameters, gradients and optimizer state sharded over them. DATASET is a folder or file of recordings. More settings can follow.
set -euo pipefail
fullshard train desktop --dataset-path "${DATASET:?a folder or file of recordings}" \
  --devices 4 --fsdp-sharding-strategy FULL_SHARD \
  --batch-size 2 --epochs 3 "$@"
