"""The main.py of a diffusion project: the built-in recipe `diffusion`, with the flags that such a script has."""

import sys

from fullshard.__main__ import main

if __name__ == "__main__":
    sys.argv[1:1] = ["train", "diffusion"]
    main()
