#!/usr/bin/env bash
# Fine-tunes an 8B embedding model on the GPUs of this machine, sharded. More settings can follow: batch.per_device=8
set -euo pipefail
cd "$(dirname "$0")/.."
fullshard train examples/qwen3_8b_fsdp.yaml "$@"
