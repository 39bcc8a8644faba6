#!/usr/bin/env bash
# Two machines with 8 GPUs each: sharded within a machine, replicated across them. DATASET is a folder or file of recordings. More settings can follow.
set -euo pipefail
fullshard train desktop --dataset-path "${DATASET:?a folder or file of recordings}" \
  --devices 8 --num-nodes 2 --node-rank "${NODE_RANK:?the number of this machine, from 0}" \
  --master "${MASTER_ADDR:?the address of machine 0}:${MASTER_PORT:-29500}" --fsdp-sharding-strategy HYBRID_SHARD \
  --batch-size 2 --epochs 3 "$@"
