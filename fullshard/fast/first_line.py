"""The first line of a run, before torch is imported, which takes seconds: the recipe was understood.

Must not import torch.
"""

from __future__ import annotations

import os
from typing import Any

import typer

from fullshard.explain.error_file import REPORTED_BY_LAUNCHER


def say(recipe: Any, *, silent: bool) -> None:
    """Once for all ranks: those that a command of ours started stay silent."""
    if not silent and REPORTED_BY_LAUNCHER not in os.environ:
        typer.echo(f"Starting {recipe.name}; its run folder is {recipe.folder}.")
