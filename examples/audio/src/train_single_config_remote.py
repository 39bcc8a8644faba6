"""The training script of an audio project: --config names a built-in recipe, such as paper_r64."""

import sys

from fullshard.__main__ import main

if __name__ == "__main__":
    sys.argv[1:1] = ["train"]
    main()
