"""Trains a language model on a topology: --fsdp-config names a preset."""

import sys

from fullshard.__main__ import main

if __name__ == "__main__":
    sys.argv[1:1] = ["train", "llm"]
    main()
