"""What a rank leaves for the process that started it, in the form that torchrun's agent reads.

Must not import torch, and must not know what the words mean.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

TOLD_BY_LAUNCHER = "FULLSHARD_TOLD_BY_LAUNCHER"
"""Set by a launcher that says the last words of the run itself, so that not every rank says them."""
_FILE = "TORCHELASTIC_ERROR_FILE"


def hand_over(message: str, *, traceback: str = "", **more: str | None) -> bool:
    """Leaves a message for the launcher; False when nobody reads it."""
    file = os.environ.get(_FILE)
    if not file:
        return False
    extra = {"py_callstack": traceback, "timestamp": str(int(time.time())), **more}
    Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
    return True


__all__ = ["TOLD_BY_LAUNCHER", "hand_over"]
