"""Is everything in place to train paper_r64? Nothing is trained."""

import sys

from fullshard.__main__ import main

if __name__ == "__main__":
    sys.argv[1:1] = ["check", "paper_r64"]
    main()
