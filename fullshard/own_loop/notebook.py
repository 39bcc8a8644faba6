"""Whether this process is a notebook, whose cells show text that ranks redraw. Must not import IPython."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from fullshard.log.console import NOTEBOOK


def in_notebook() -> bool:
    """Whether cells of a notebook run here; a terminal with IPython has no kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


@contextlib.contextmanager
def shown_in_notebook() -> Iterator[None]:
    """In a notebook, this process and the ranks that it starts draw one bar that moves; elsewhere nothing changes."""
    if NOTEBOOK in os.environ or not in_notebook():
        yield
        return
    os.environ[NOTEBOOK] = "1"
    try:
        yield
    finally:
        del os.environ[NOTEBOOK]
