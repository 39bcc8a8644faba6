"""The error file of a rank: its last words for the process that started it, in the format of torchrun's agent.

The only writer and the only reader. Must not import torch, and must not know what the words mean.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPORTED_BY_LAUNCHER = "FULLSHARD_REPORTED_BY_LAUNCHER"
"""Set by a launcher that prints the last words of the run itself, so that not every rank does."""
_FILE = "TORCHELASTIC_ERROR_FILE"


@dataclass(frozen=True)
class LastWords:
    """What one rank said before it ended."""

    text: str = ""
    """Its traceback, or its message if it has no traceback."""
    folder: Path | None = None
    """The crash folder that it wrote to."""
    message: str = ""


def hand_over(message: str, *, traceback: str = "", **more: str | None) -> bool:
    """Leaves a message for the launcher; False when nobody reads it, or the disk is full."""
    file = os.environ.get(_FILE)
    if not file:
        return False
    extra = {"py_callstack": traceback, "timestamp": str(int(time.time())), **more}
    whole = Path(f"{file}.new")  # half a file would end the launcher with a traceback
    try:
        whole.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
        os.replace(whole, file)
    except OSError:
        return False
    return True


def handed_over(data: Any) -> LastWords:
    """The words in the content of an error file; None if another program wrote it."""
    try:
        message, more = data["message"]["message"], data["message"]["extraInfo"]
        folder = Path(more["crash"]) if more.get("crash") else None
        return LastWords(more["py_callstack"] or message, folder, message)
    except (KeyError, TypeError, AttributeError):
        return LastWords()
