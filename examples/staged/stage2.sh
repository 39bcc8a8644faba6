#!/usr/bin/env bash
# Stage 2 alone, from the checkpoint of stage 1, on four machines. More settings can follow.
set -euo pipefail
fullshard train "$(dirname "$0")/recipe.yaml" --stage stage2 --fsdp-config multi_node_fsdp --devices 8 --node-rank "${NODE_RANK:?the number of this machine, from 0}" \
  --master "${MASTER_ADDR:?the address of machine 0}:${MASTER_PORT:-29500}" "$@"
