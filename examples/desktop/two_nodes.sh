#!/usr/bin/env bash
# Two machines with 4 GPUs each. DATASET is a folder or file of recordings. More settings can follow.
set -euo pipefail
fullshard train desktop --dataset-path "${DATASET:?a folder or file of recordings}" \
  --devices 4 --num-nodes 2 --node-rank "${NODE_RANK:?the number of this machine, from 0}" \
  --master "${MASTER_ADDR:?the address of machine 0}:${MASTER_PORT:-29500}" --fsdp-sharding-strategy FULL_SHARD \
  --batch-size 2 --epochs 3 "$@"
