"""Open sources that several kinds share (concatenated, in memory, Arrow), and helpers for errors about records.

Must not know tokens or ranks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.contracts.data import Record, Records
from fullshard.errors import DataError

MAPPING = "data.encode.column_mapping"
"""The setting that maps a user's columns to those of an encoder."""


def digest(path: Path) -> str:
    """A hash of a file's bytes; cached until its size or modification time changes."""
    stat = path.stat()
    return _digest(str(path.resolve()), stat.st_size, stat.st_mtime_ns)


@cache
def _digest(path: str, size: int, mtime_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def combine(*parts: str) -> str:
    """One fingerprint from several."""
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def origins(records: Records) -> np.ndarray:
    """The stored record behind each index; only a mixture repeats records."""
    known = getattr(records, "origins", None)
    return np.asarray(known() if known else np.arange(len(records)))


def keys_found(record: Record) -> str:
    """The keys of a record for an error message, with nulls marked."""
    keys = [f"{key!r} (null)" if value is None else repr(key) for key, value in record.items()]
    return f"Keys found: {', '.join(keys) or 'none'}."


@contextmanager
def named(records: Records, index: int, record: Record) -> Iterator[None]:
    """Adds the location of a record to errors about it, and looks for lone surrogates as their cause."""
    try:
        try:
            yield
        except Exception:
            check_text(record)
            raise
    except DataError as error:
        raise DataError(f"{records.where(index)}: {error}") from error


def check_text(record: Record) -> None:
    """Raises on lone surrogates, which JSON can hold and no tokenizer can read."""
    for key, value in record.items():
        # Python joins surrogate pairs; any that are left are single.
        if half := re.search(r"[\ud800-\udfff]", json.dumps(value, ensure_ascii=False, default=str)):
            raise DataError(
                f"{key!r} contains \\u{ord(half[0]):04x}, a lone surrogate (half of a character), which no tokenizer "
                "can read. Replace it with the whole character or with \\ufffd, or remove the record."
            )


@contextmanager
def readable(where: str) -> Iterator[None]:
    """Turns errors of reading a table into DataError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 text (byte 0x{error.object[error.start]:02x}). Write the text as UTF-8."
        ) from error
    except OSError as error:
        reason = str(error.strerror or error).rstrip(".")
        raise DataError(f"{where}: cannot be read: {reason}. Write the file again.") from error


def without_filling(record: Record) -> Record:
    """A record of a table without the nulls in its nested objects.

    In Arrow all objects of a column have the same keys, so null means that a record did not have the key."""
    return {key: _unfilled(value) for key, value in record.items()}


def _unfilled(value: Any) -> Any:
    if isinstance(value, dict):
        found = {key: inner for key in value if (inner := _unfilled(value[key])) is not None}
        return found or (None if value else value)
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return [_unfilled(entry) for entry in value]
    return value


@dataclass(frozen=True)
class Listed:
    """Records in memory."""

    rows: Sequence[Record]
    where: Callable[[int], str]
    fingerprint: Callable[[], str]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Record:
        return self.rows[index]


def locate(ends: np.ndarray, index: int) -> tuple[int, int]:
    """The part of concatenated records that holds an index, and its index there; `ends` are the parts' ends."""
    if not 0 <= index < (ends[-1] if len(ends) else 0):
        raise IndexError(index)
    part = int(np.searchsorted(ends, index, side="right"))
    return part, index - (int(ends[part - 1]) if part else 0)


class Joined:
    """Several open sources, concatenated; of all together only the first records, with a limit."""

    def __init__(self, parts: Sequence[Records], *, notes: Sequence[str] = (), limit: int | None = None) -> None:
        self.parts, self.notes, self._first = list(parts), list(notes), [f"first {limit}"] if limit else []
        self._ends = np.cumsum([len(part) for part in self.parts]).clip(max=limit or 2**62)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Record:
        part, local = self._locate(index)
        return part[local]

    def where(self, index: int) -> str:
        part, local = self._locate(index)
        return part.where(local)

    def fingerprint(self) -> str:
        return combine("joined", *(part.fingerprint() for part in self.parts), *self._first)

    def _locate(self, index: int) -> tuple[Records, int]:
        part, local = locate(self._ends, index)
        return self.parts[part], local


class ArrowRecords:
    """A data set of the `datasets` library."""

    def __init__(self, dataset: Any, *, name: str) -> None:
        if len(dataset) == 0:
            raise DataError(f"{name}: the data set has no records. Choose another split or data set.")
        self._dataset, self._name = dataset, name
        # Undecoded: the library would fail on a damaged image or clip without naming it.
        is_media = any(name in repr(dataset.features) for name in ("Image(", "Audio("))
        self._stored = dataset.with_format("arrow") if is_media else None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Record:
        with readable(self.where(index)):
            return without_filling(self._dataset[index] if self._stored is None else self._stored[index].to_pylist()[0])

    def where(self, index: int) -> str:
        return f"{self._name}, record {index + 1}"

    def fingerprint(self) -> str:
        files = [Path(entry["filename"]) for entry in self._dataset.cache_files]
        # A data set in memory has no files.
        return combine("arrow", *map(digest, files)) if files else str(self._dataset._fingerprint)
