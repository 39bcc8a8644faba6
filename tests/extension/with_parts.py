"""Trains on a rank that finds user files in a folder, as it would through PYTHONPATH. Sent to the rank pool by name."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from tests.small import train


def train_with(folder: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """One rank of a run with `folder` on the path."""
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return train(settings)
    finally:
        sys.path.remove(folder)
