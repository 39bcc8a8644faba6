#!/usr/bin/env bash
# Eight machines with 8 GPUs each: run it on every one. More settings can follow.
set -euo pipefail
fullshard train "$(dirname "$0")/recipe.yaml" --fsdp-config large_scale_fsdp --num-nodes 8 --devices 8 --node-rank "${NODE_RANK:?the number of this machine, from 0}" \
  --master "${MASTER_ADDR:?the address of machine 0}:${MASTER_PORT:-29500}" "$@"
