#!/usr/bin/env bash
# Four GPUs that each write their own part of a checkpoint. DATASET is a folder or file of recordings. More settings can follow.
set -euo pipefail
fullshard train desktop --dataset-path "${DATASET:?a folder or file of recordings}" \
  --devices 4 --fsdp-sharding-strategy FULL_SHARD --fsdp-state-dict-type sharded \
  --batch-size 2 --epochs 3 "$@"
