"""What a started rank does: its part of one run, and every word of it into a file.

Must not know what the run is for.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

RECIPE, RESUME = "recipe.yaml", "resume"


def run_one(folder: Path) -> int:
    """This rank's part in the recipe that lies in the folder; its exit code."""
    _speak_into(folder / f"rank-{os.environ.get('RANK', '0')}.txt")
    import torch

    from fullshard import run
    from fullshard.recipes.read import read

    if torch.cuda.is_available():
        # Otherwise some kernels add up in another order every time, and no two runs are equal bit by bit.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    return run.join(read(folder / RECIPE), resume=(folder / RESUME).read_text(encoding="utf-8"))


def _speak_into(path: Path) -> None:
    """Standard output and error of this process, and of every process it starts, into a file."""
    with path.open("a", encoding="utf-8") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())


__all__ = ["RECIPE", "RESUME", "run_one"]
