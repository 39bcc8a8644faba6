#!/usr/bin/env bash
# One GPU. DATASET is a folder or file of recordings. More settings can follow.
set -euo pipefail
fullshard train desktop --dataset-path "${DATASET:?a folder or file of recordings}" \
  --devices 1 \
  --batch-size 2 --epochs 3 "$@"
