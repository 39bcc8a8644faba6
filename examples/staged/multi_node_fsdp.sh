#!/usr/bin/env bash
# Four machines with 8 GPUs each: run it on every one. More settings can follow.
set -euo pipefail
fullshard train "$(dirname "$0")/recipe.yaml" --fsdp-config multi_node_fsdp --num-nodes 4 --devices 8 --node-rank "${NODE_RANK:?the number of this machine, from 0}" \
  --master "${MASTER_ADDR:?the address of machine 0}:${MASTER_PORT:-29500}" "$@"
