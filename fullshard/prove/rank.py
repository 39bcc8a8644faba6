"""What a rank of a proof does: its part of one run, with all output going to a file.

Must not know what the run is for.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

RECIPE, RESUME = "recipe.yaml", "resume"


def run_one(folder: Path) -> int:
    """Runs the recipe in the folder as one rank; returns its exit code."""
    _redirect_output(folder / f"rank-{os.environ.get('RANK', '0')}.txt")
    import torch

    from fullshard import run
    from fullshard.recipes.read import read

    if torch.cuda.is_available():
        # Otherwise some kernels sum in a different order every time, and no two runs are bitwise equal.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    return run.join(read(folder / RECIPE), resume=(folder / RESUME).read_text(encoding="utf-8"))


def _redirect_output(path: Path) -> None:
    """Redirects stdout and stderr of this process, and of every process it starts, to a file."""
    with path.open("a", encoding="utf-8") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
