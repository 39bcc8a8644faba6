"""One data file as records: jsonl, json, txt, csv, tsv, parquet.

Errors name the file, the line and the problem. Must not know folders, tokens or ranks.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.config.problems import sort_of
from fullshard.contracts.data import Record, Records
from fullshard.data.records import Listed, combine, digest, locate, readable, without_filling
from fullshard.errors import DataError

SUFFIXES = (".csv", ".json", ".jsonl", ".parquet", ".tsv", ".txt")
PIECES = 20
"""The fewest records of all text files together, so that some can be held out for validation."""
SHORTEST_CHARACTERS, PIECE_CHARACTERS = 1024, 64 * 1024
"""The length of a txt record: `PIECES` never cuts below the first; the second is the most."""

_BOM = b"\xef\xbb\xbf"


def open_file(path: Path, *, pieces: int = PIECES) -> Records:
    """The records of one file; a txt file gives at least `pieces`, unless it is very short."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(
            f"{path}: unknown suffix {path.suffix or '(none)'!r}. Allowed: {', '.join(SUFFIXES)}. "
            "Convert or rename the file."
        )
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty. Put records into it or remove it from the list.")
        if suffix == ".txt":
            return TextPieces(path, pieces=pieces)
        if suffix in (".csv", ".tsv"):
            return _table(path, delimiter="\t" if suffix == ".tsv" else ",")
        return {".json": _json, ".jsonl": JsonLines, ".parquet": Parquet}[suffix](path)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror or error}. Check the file and its permissions."
        ) from error


class _Ranges:
    """Records that are ranges of a file's bytes. Only the ranges are in memory: start, end and number of the line."""

    def __init__(self, path: Path, ranges: np.ndarray, *format: str) -> None:
        self._path, self._ranges, self._format = path, ranges, format
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")

    def __len__(self) -> int:
        return len(self._ranges)

    def _read(self, index: int) -> bytes:
        return self._bytes[slice(*self._ranges[index, :2])].tobytes()

    def where(self, index: int) -> str:
        return f"{self._path}:{self._ranges[index, 2]}"

    def fingerprint(self) -> str:
        return combine(*self._format, digest(self._path))


class JsonLines(_Ranges):
    """One JSON object per line; blank lines do not count."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _lines(path), "jsonl")
        if not len(self):
            raise DataError(f"{path}: the file has only blank lines. Each line must be one JSON object.")
        self[0]

    def __getitem__(self, index: int) -> Record:
        record = _parse(self._read(index), where=self.where(index), rule="Each line must be one JSON object.")
        if not isinstance(record, dict):
            raise DataError(
                f"{self.where(index)}: found {sort_of(record)}, but each line must be one JSON object like "
                '{"text": "..."}.'
            )
        return record


def _lines(path: Path) -> np.ndarray:
    """The range of every line that is not blank."""
    data, chunk = np.memmap(path, dtype=np.uint8, mode="r"), 1 << 20
    newlines = np.concatenate([np.flatnonzero(data[at : at + chunk] == 10) + at for at in range(0, len(data), chunk)])
    starts, ends = np.append(0, newlines + 1), np.append(newlines, len(data))
    starts[0] = len(_BOM) if data[: len(_BOM)].tobytes() == _BOM else 0
    filled = ends > starts
    # Only a line that starts with white space can be blank.
    for line in np.flatnonzero(filled & (data[np.minimum(starts, len(data) - 1)] <= 32)):
        filled[line] = bool(data[starts[line] : ends[line]].tobytes().strip())
    return np.stack([starts, ends, np.arange(1, len(ends) + 1)], axis=1)[filled]


def _parse(data: bytes, *, where: str, rule: str) -> Any:
    try:
        return json.loads(_utf8(data, where=where))
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise DataError(f"{where}: invalid JSON at {at}: {error.msg}. {rule}") from error
    except ValueError as error:
        raise DataError(f"{where}: a number has too many digits to be read. Write it as a string.") from error
    except RecursionError as error:
        raise DataError(f"{where}: lists and objects are nested too deeply to be read. {rule}") from error


def _json(path: Path) -> Records:
    rule = "A .json file is one list of objects; for one object a line use the suffix .jsonl."
    content = _parse(path.read_bytes().removeprefix(_BOM), where=str(path), rule=rule)
    if isinstance(content, dict):
        lists = [key for key, value in content.items() if isinstance(value, list)]
        if len(lists) != 1:
            raise DataError(
                f"{path}: found an object with {len(lists)} lists (keys: {', '.join(content) or 'none'}), but a .json "
                "file is a list of records or an object that holds exactly one list."
            )
        content = content[lists[0]]
    if not isinstance(content, list):
        raise DataError(f"{path}: found {sort_of(content)}. {rule}")
    if not content:
        raise DataError(f"{path}: the list is empty. Put records into it or remove the file from the list.")
    for number, record in enumerate(content, start=1):
        if not isinstance(record, dict):
            raise DataError(f"{path}, record {number}: found {sort_of(record)}, but each record must be an object.")
    return Listed(
        content,
        where=lambda index: f"{path}, record {index + 1}",
        fingerprint=lambda: combine("json", digest(path)),
    )


class TextPieces(_Ranges):
    """A plain text, cut at line ends into at least `pieces` records of 1 to 64 KiB characters, if it is long enough.

    A line is cut, between words, only if its end would leave a record less than half full."""

    def __init__(self, path: Path, *, pieces: int = PIECES) -> None:
        limit = PIECE_CHARACTERS
        # A character has at most four bytes, so a larger file has enough pieces of full size.
        if path.stat().st_size < 4 * pieces * PIECE_CHARACTERS:
            characters = len(path.read_bytes().decode("utf-8", errors="replace"))
            limit = min(PIECE_CHARACTERS, max(SHORTEST_CHARACTERS, characters // pieces))
        super().__init__(path, np.fromiter(_pieces(path, limit=limit), dtype=(np.int64, 3)), "txt", str(limit))
        if not any(self[index]["text"].strip() for index in range(len(self))):
            raise DataError(f"{path}: the file has only white space. Put text into it or remove it from the list.")

    def __getitem__(self, index: int) -> Record:
        return {"text": self._read(index).decode("utf-8").replace("\r\n", "\n")}


def _pieces(path: Path, *, limit: int) -> Iterator[tuple[int, int, int]]:
    """The range of each piece, with the number of its first line."""
    with open(path, "rb") as file:
        at = start = file.seek(len(_BOM) if file.read(len(_BOM)) == _BOM else 0)
        first, held = 1, 0
        for number, raw in enumerate(file, start=1):
            line = _utf8(raw, where=f"{path}:{number}")
            begin = 0
            while held + len(line) - begin > limit:
                # At the line end; if that leaves less than half a piece, after a space or at the limit.
                if held < limit // 2:
                    room = limit - held
                    cut = line.rfind(" ", begin + room // 2, begin + room) + 1 or begin + room
                    at += len(line[begin:cut].encode())
                    begin = cut
                yield start, at, first
                start, first, held = at, number, 0
            held += len(line) - begin
            at += len(line[begin:].encode())
        yield start, at, first


def _utf8(raw: bytes, *, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 text (byte 0x{raw[error.start]:02x} at byte {error.start + 1}). "
            "Save the file as UTF-8."
        ) from error


def _table(path: Path, *, delimiter: str) -> Records:
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            _utf8(raw, where=f"{path}:{number}")
    # The default limit of 128 KiB per field is too small for documents.
    limit = csv.field_size_limit(sys.maxsize)
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            # Each row with the line where it ends.
            (first, header), *rows = [(reader.line_num, row) for row in reader if row] or [(1, [])]
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: {error}. Check the quotes on this line.") from error
        finally:
            csv.field_size_limit(limit)
    if len(set(header)) < len(header):
        raise DataError(f"{path}:{first}: the header names a column twice: {', '.join(header)}.")
    for line, row in rows:
        if len(row) != len(header):
            raise DataError(
                f"{path}:{line}: found {len(row)} columns, but the header has {len(header)} ({', '.join(header)}). "
                f"Quote fields that hold {delimiter!r} or a line end."
            )
    if not rows:
        raise DataError(f"{path}: the file has no rows under its header. Put records into it.")
    lines = [line for line, _ in rows]
    return Listed(
        [dict(zip(header, row, strict=True)) for _, row in rows],
        where=lambda index: f"{path}:{lines[index]}",
        fingerprint=lambda: combine("table", delimiter, digest(path)),
    )


class Parquet:
    """A parquet file, read one row group at a time."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            self._file = pq.ParquetFile(path)
        except pa.ArrowInvalid as error:
            raise DataError(f"{path}: not a parquet file: {error}") from error
        self._path = path
        groups = map(self._file.metadata.row_group, range(self._file.num_row_groups))
        self._ends = np.cumsum([group.num_rows for group in groups], dtype=np.int64)
        if len(self) == 0:
            raise DataError(f"{path}: the file has no rows. Put records into it or remove it from the list.")
        self._held: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def __getitem__(self, index: int) -> Record:
        group, local = locate(self._ends, index)
        with readable(self.where(index)):
            if self._held[0] != group:
                self._held = (group, self._file.read_row_group(group))
            return without_filling(self._held[1].slice(local, 1).to_pylist()[0])

    def where(self, index: int) -> str:
        return f"{self._path}, record {index + 1}"

    def fingerprint(self) -> str:
        return combine("parquet", digest(self._path))
