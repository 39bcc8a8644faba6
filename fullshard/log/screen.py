"""The stream that a console writes to: whether it is a terminal, and how it is opened.

Must not know what is written.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from rich.console import Console as Screen


def is_terminal(stream: TextIO) -> bool:
    """Whether lines can be redrawn in place. FORCE_COLOR and the like do not turn a file into a terminal."""
    return stream.isatty() and os.environ.get("TERM") not in (None, "dumb", "unknown")


def open_screen(stream: TextIO | None, *, on_terminal: bool, stderr: bool) -> Screen:
    """A screen on `stream`, or on the current stdout or stderr."""
    out = stream or (sys.stderr if stderr else sys.stdout)
    if isinstance(out, io.TextIOWrapper) and not out.encoding.lower().startswith("utf"):
        # A character that the stream cannot encode must not stop a run.
        out.reconfigure(errors="replace")
    return Screen(
        file=stream,
        stderr=stderr and stream is None,
        force_terminal=on_terminal and out.isatty(),
        force_jupyter=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
