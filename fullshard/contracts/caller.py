"""What the program that called `fullshard.train` gets from a run, and may ask of it. Must not know who calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Caller:
    """By default it hears nothing and asks for nothing."""

    keep: Callable[[nn.Module], Any] = bool
    """Receives the trained model."""
    write: Callable[[dict[str, Any]], Any] = bool
    """Receives every record of metrics.jsonl, on rank 0."""
    stop_asked: Callable[[], bool] = bool
    """Whether to save and stop after this step. All ranks do if one is asked."""
    save_asked: Callable[[], bool] = bool
    """Whether to save after this step and go on."""


NOBODY = Caller()
"""A command: no program calls."""
