"""The train.py of a project on desktop recordings: the built-in recipe `desktop`, with the flags of such a script."""

import sys

from fullshard.__main__ import main

if __name__ == "__main__":
    sys.argv[1:1] = ["train", "desktop"]
    main()
