"""The train.py of an embedding project: it trains the YAML file that is named first."""

import sys

from fullshard.__main__ import main

if __name__ == "__main__":
    sys.argv[1:1] = ["train"]
    main()
