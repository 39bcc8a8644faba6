"""Trains on a rank that finds user files in a folder, as it would through PYTHONPATH. Sent to the rank pool by name."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.families.embedding import cases
from tests.small import train


def train_with(folder: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """One rank of a run with `folder` on the path."""
    with _on_the_path(folder):
        return train(settings)


def steps_with(folder: str, model: Path, objectives: list[dict[str, Any]]) -> list[tuple[float, Any]]:
    """Loss and gradients of one contrastive step for each objective, with `folder` on the path."""
    with _on_the_path(folder):
        return cases.steps_of(model, objectives, 4)


@contextlib.contextmanager
def _on_the_path(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
