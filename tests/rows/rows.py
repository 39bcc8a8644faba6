"""The rows of rows.yaml, and where each of them is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FILES = Path(__file__).parent / "files"
COUNTS = {"S0": 40, "S1": 46, "S2": 33, "S3": 37, "S4": 39}
"""How many rows each document has."""
ROWS: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "rows.yaml").read_text(encoding="utf-8"))
SHOWN_BY_RUNNING = ("train", "file", "log", "folder", "command", "explain")


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
