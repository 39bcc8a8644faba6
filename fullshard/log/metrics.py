"""`metrics.jsonl`: every number of a run, one JSON object a line, always on, rank 0 only.

NaN and Inf are written as null and named in `not_finite`: `"loss": null, "not_finite": {"loss": "nan"}`.
Resuming at step s drops the lines after s, so that no curve doubles back, and a line cut short by a kill.
Must not know what the numbers mean.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"


class Metrics:
    """The open file. `step` is the step that the run resumes from; at 0 the file starts empty."""

    def __init__(self, path: Path, *, step: int = 0) -> None:
        self.dropped = _cut(path, step) if path.exists() else 0
        """Lines after that step, which were removed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record; it is in the file when this returns."""
        self._file.write(encode(record) + "\n")

    def close(self) -> None:
        self._file.close()


def encode(record: Mapping[str, Any]) -> str:
    """One record as valid JSON in one line."""
    not_finite: dict[str, str] = {}
    finite = _finite(record, "", not_finite)
    if not_finite:
        finite["not_finite"] = not_finite
    return json.dumps(finite, allow_nan=False, ensure_ascii=False)


def _finite(value: Any, where: str, not_finite: dict[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite(v, f"{where}.{k}" if where else str(k), not_finite) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v, f"{where}[{i}]", not_finite) for i, v in enumerate(value)]
    if not isinstance(value, Real) or isinstance(value, bool):
        return value
    if not math.isfinite(value):
        not_finite[where] = str(float(value))
        return None
    return int(value) if isinstance(value, Integral) else float(value)


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a train or validation record by tag: `train/loss`, and `time/data` for a group of numbers."""
    kind = record.get("kind")
    if kind == "event":
        return {}
    tagged: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            tagged |= {f"{name}/{key}": number for key, number in value.items() if _is_number(number)}
        elif _is_number(value) and name != "step":
            tagged[f"{kind}/{name}"] = value
    return tagged


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a run, without an incomplete last line."""
    return [record for line in _lines(path) if (record := _decode(line)) is not None]


def last_step(path: Path) -> int | None:
    """The highest step in the file, or None."""
    steps = [r["step"] for r in read(path) if isinstance(r.get("step"), int)] if path.exists() else []
    return max(steps, default=None)


def _lines(path: Path) -> list[str]:
    # Not splitlines(): text inside a record may hold separators such as U+2028.
    return path.read_text(encoding="utf-8", errors="replace").split("\n")


def _decode(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _cut(path: Path, step: int) -> int:
    lines = _lines(path)
    torn = lines.pop()
    kept = [line for line in lines if _survives(_decode(line), step)] if step else []
    dropped = len(lines) - len(kept) + bool(torn)
    if dropped:
        temporary = path.with_name(path.name + ".new")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    return dropped


def _survives(record: dict[str, Any] | None, step: int) -> bool:
    return record is not None and not (isinstance(record.get("step"), (int, float)) and record["step"] > step)
