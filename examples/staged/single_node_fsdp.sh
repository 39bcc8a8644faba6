#!/usr/bin/env bash
# One machine with 8 GPUs. More settings can follow.
set -euo pipefail
fullshard train "$(dirname "$0")/recipe.yaml" --fsdp-config single_node_fsdp --devices 8 "$@"
