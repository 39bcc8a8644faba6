"""Records as curves: one point for each record, or for each bucket of records if there are too many.

A bucket keeps the mean, the lowest and the highest value, so that no spike is lost. NaN and Inf are no points; they are
counted and their steps named. Must not know which numbers a run logs beyond `step`, `seconds` and `tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fullshard.report.folders import Run

DIGITS = 7
"""Significant digits of a number on the page."""
_NOT_CURVES = ("step", "total_step", "epoch", "samples", "tokens", "seconds")
_NAMED = 20
"""So many steps with NaN or Inf are named."""
Numbers = np.ndarray[Any, np.dtype[np.float64]]


def curves(run: Run, *, most: int) -> dict[str, Any]:
    """The curves of a run, with a limited number of points each: x values by kind of record, and series by name."""
    found: dict[str, Any] = {"label": run.label, "series": {}, "not_finite": {}}
    train = run.of_kind("train")
    for kind, records in (("train", train), ("validation", run.of_kind("validation"))):
        size = max(math.ceil(len(records) / most), 1)
        ends = [min(end, len(records)) - 1 for end in range(size, len(records) + size, size)] if records else []
        found[kind] = {"records": len(records), "per_point": size, "step": [records[end]["step"] for end in ends]}
        found[kind] |= {axis: _at(train, found[kind]["step"], axis) for axis in ("seconds", "tokens")}
        for name in _names(records):
            found["series"][f"{kind}/{name}"] = _series(_column(records, name), size)
            if steps := _not_finite(records, name):
                found["not_finite"][f"{kind}/{name}"] = {"count": len(steps), "steps": steps[:_NAMED]}
    if found["series"].get("train/host_memory_gib") == found["series"].get("train/memory_gib"):
        found["series"].pop("train/host_memory_gib", None)  # on a CPU both are the same
    return found


def _names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every number that some record has, in the order of appearance."""
    names = {name: None for record in records for name, value in record.items() if _is_number(value)}
    return [name for name in names if name not in _NOT_CURVES]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _column(records: Sequence[Mapping[str, Any]], name: str) -> Numbers:
    """One number of every record; NaN where it is missing."""
    return np.array([v if _is_number(v := each.get(name)) else math.nan for each in records], dtype=np.float64)


def _series(values: Numbers, size: int) -> dict[str, list[float | None]]:
    if size == 1:
        return {"mean": _plain(values)}
    padded = np.full(math.ceil(len(values) / size) * size, math.nan)
    padded[: len(values)] = values
    rows = padded.reshape(-1, size)
    empty = np.isnan(rows).all(axis=1)
    rows[empty, 0] = 0.0  # NumPy warns about a row without numbers
    kept = {"mean": np.nanmean(rows, axis=1), "low": np.nanmin(rows, axis=1), "high": np.nanmax(rows, axis=1)}
    return {name: _plain(np.where(empty, math.nan, column)) for name, column in kept.items()}


def _plain(values: Numbers) -> list[float | None]:
    return [None if math.isnan(value) else float(f"{value:.{DIGITS}g}") for value in values.tolist()]


def _at(train: Sequence[Mapping[str, Any]], steps: Sequence[int], axis: str) -> list[float | None]:
    """Seconds or tokens since the start of the run at these steps, as the train records around them say."""
    known = [(each["step"], each[axis]) for each in train if _is_number(each.get(axis))]
    if not known or not steps:
        return [None] * len(steps)
    x, y = np.array(known, dtype=np.float64).T
    return _plain(np.interp(steps, x, y))


def _not_finite(records: Sequence[Mapping[str, Any]], name: str) -> list[int]:
    return [each["step"] for each in records if isinstance(each.get("not_finite"), dict) and name in each["not_finite"]]
