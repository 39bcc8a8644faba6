"""Trains the recipe beside this file on a topology: --fsdp-config names a preset, --stage one of its stages."""

import sys
from pathlib import Path

from fullshard.__main__ import main

if __name__ == "__main__":
    sys.argv[1:1] = ["train", str(Path(__file__).with_name("recipe.yaml"))]
    main()
