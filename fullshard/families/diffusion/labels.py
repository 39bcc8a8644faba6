"""Reads the class number of a record.

Must not know images, models or what a class means.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np

from fullshard.config.problems import found
from fullshard.contracts.data import Record
from fullshard.data.records import MAPPING, keys_found
from fullshard.errors import DataError
from fullshard.images.reading import is_empty

NO_LABEL = -1
"""The label of a sample without one."""


def label_of(record: Record, *, mapped: str | None, classes: int | None) -> int:
    """From 0 to `classes` - 1; if that is None, any from 0 on, or NO_LABEL. `mapped` is the user's column."""
    column = mapped or "label"
    value = record.get(column)
    if mapped is not None and column not in record:
        raise DataError(
            f"no {column!r} in the record, which {MAPPING} maps to 'label'. {keys_found(record)} Name one of "
            "these, or give the record a null there."
        )
    allowed = "from 0 on" if classes is None else f"from 0 to {classes - 1}"
    if is_empty(value):
        if classes is None:
            return NO_LABEL
        raise DataError(
            f"no {column!r} in the record, but data.encode.classes = {classes} asks for one {allowed}. "
            f"{keys_found(record)} Give it one, or remove the record."
        )
    label = _whole_number(value)
    if label is None:
        raise DataError(
            f"{column!r} must be the number of a class, {allowed}, found {found(value)}. "
            f"Number the classes, or take another column with {MAPPING} = {{label: COLUMN}}."
        )
    if not 0 <= label < (2**63 if classes is None else classes):
        many = f", as data.encode.classes = {classes} says" if classes is not None else ""
        raise DataError(
            f"{column!r} is {label}, but classes go {allowed}{many}. Give the record another label, or remove it."
        )
    return label


def _whole_number(value: Any) -> int | None:
    """A class number as tables and JSON files write it; not a boolean."""
    if isinstance(value, str):
        try:
            value = int(value) if value.strip().lstrip("+-").isdecimal() else float(value)
        except ValueError:
            return None
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return int(value) if isinstance(value, (float, np.floating)) and float(value).is_integer() else None
