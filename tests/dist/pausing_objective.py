"""An objective whose import makes one phase of the run wait, in native code, so that a test can signal it there.

PAUSE_IN names a function of the package; before it is called, a rank writes PAUSE_AT/RANK and sleeps in C, where Python
runs no handler, until PAUSE_AT/go exists.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from pathlib import Path
from typing import Any

from fullshard.families.language.objectives.causal_lm import CausalLM


class Paused(CausalLM):
    """The usual objective."""


def _pause() -> None:
    folder = Path(os.environ["PAUSE_AT"])
    (folder / os.environ.get("RANK", "0")).write_text(str(os.getpid()))
    while not (folder / "go").exists():
        ctypes.CDLL(None).usleep(100_000)


def _wrap(dotted: str) -> None:
    place, _, name = dotted.rpartition(":")
    module, _, owner = place.partition("/")
    home: Any = importlib.import_module(module)
    home = getattr(home, owner) if owner else home
    act = getattr(home, name)

    @functools.wraps(act)
    def paused(*args: Any, **kwargs: Any) -> Any:
        _pause()
        return act(*args, **kwargs)

    setattr(home, name, paused)


if "PAUSE_IN" in os.environ:
    _wrap(os.environ["PAUSE_IN"])
