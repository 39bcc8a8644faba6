"""Records from files: a file, a folder, a glob pattern or a list of these; also a data set saved by `datasets`.

Must not know tokens or ranks.
"""

from __future__ import annotations

import difflib
import glob
import os
from pathlib import Path
from typing import Any

from pydantic import Field

from fullshard.contracts.data import Records, Source
from fullshard.data.formats import PIECES, SUFFIXES, open_file
from fullshard.data.records import ArrowRecords, Joined
from fullshard.errors import DataError


class Files(Source):
    """Files on disk, in the given order; files of a folder or pattern in the order of their names."""

    path: str | list[str]
    """A file (.jsonl, .json, .txt, .csv, .tsv, .parquet), a folder, a glob pattern, or a list of these. Text files are
    cut into records at line ends: of 64 KiB at most, and smaller where few files would give fewer than 20 records."""
    split: str | None = None
    """Which part of a folder: a split of a saved data set, or the files and folders whose name begins with it."""
    limit: int | None = Field(None, ge=1)
    """Only the first records of all files together; null: all."""

    def open(self) -> Records:
        paths = [self.path] if isinstance(self.path, str) else self.path
        if not paths:
            raise DataError("path = [] names no file. Name at least one file or folder.")
        notes: list[str] = []
        found = [file for text in paths for path in _matches(text) for file in self._found(path, notes)]
        pieces = -(-PIECES // len(found))
        opened = (_saved_dataset(p, split=self.split) if p.is_dir() else open_file(p, pieces=pieces) for p in found)
        return Joined(list(opened), notes=notes, limit=self.limit)

    def _found(self, path: Path, notes: list[str]) -> list[Path]:
        """The data files and saved data sets of a path."""
        if _is_saved_dataset(path):
            return [path]
        if path.is_file():
            if self.split is not None:
                raise DataError(f"{path}: split = {self.split!r} needs a folder, but this is a file. Leave split out.")
            return [path]
        found, left_out = _inside(path, split=self.split)
        if not found:
            raise DataError(
                f"{path}: no data file in this folder{f' belongs to split {self.split!r}' if self.split else ''}. "
                f"Found: {_some(left_out) or 'nothing'}. Allowed: {', '.join(SUFFIXES)}."
            )
        if left_out and self.split is None:
            said = "file is not data and was" if len(left_out) == 1 else "files are not data and were"
            notes.append(f"{path}: {len(left_out):,} {said} left out ({_some(left_out)}).")
        return found


def _matches(text: str) -> list[Path]:
    # os.path returns False where Path raises: on names that are too long, or ~ with an unknown user.
    path = Path(os.path.expanduser(text))
    if os.path.exists(path):
        return [path]
    if glob.has_magic(text):
        matched = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        # `**` matches a folder and its files; reading both would count records twice.
        files = [p for p in matched if p.is_file()]
        if matched:
            return files or matched
        raise DataError(f"{text}: no file matches this pattern. Check it with: ls {text}")
    raise _missing(path, text)


def _missing(path: Path, text: str) -> DataError:
    folder = path.parent
    if not os.path.isdir(folder):
        existing = next(parent for parent in folder.absolute().parents if os.path.isdir(parent))
        return DataError(
            f"{text}: no such file, and no folder {folder}; the path exists up to {existing}. Check the path; for a "
            "data set of the Hugging Face hub write {kind: hub, name: ...}."
        )
    names = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
    near = difflib.get_close_matches(path.name, names, n=3)
    # Without a similar name: data files and folders.
    near = near or [name for name in names if Path(name).suffix.lower() in SUFFIXES or (folder / name).is_dir()][:5]
    there = f"Found in {folder.absolute()}: {', '.join(near)}" if near else f"{folder.absolute()} has no data"
    return DataError(f"{text}: no such file or folder. {there}. Check the path.")


def _inside(folder: Path, *, split: str | None) -> tuple[list[Path], list[Path]]:
    """Data files and saved data sets under a folder, by name, and all other files."""
    found: list[Path] = []
    left_out: list[Path] = []
    for child in sorted(path for path in folder.iterdir() if not path.name.startswith(".")):
        if split not in (None, child.name) and not child.name.startswith((f"{split}.", f"{split}-", f"{split}_")):
            left_out.append(child)
        elif child.is_dir() and not _is_saved_dataset(child):
            deeper, rest = _inside(child, split=None)
            found += deeper
            left_out += rest
        else:
            (found if child.is_dir() or child.suffix.lower() in SUFFIXES else left_out).append(child)
    return found, left_out


def _some(paths: list[Path]) -> str:
    names = [path.name for path in paths]
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def _saved_dataset(path: Path, *, split: str | None) -> Records:
    from datasets import DatasetDict, load_from_disk

    try:
        dataset: Any = load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: this saved data set cannot be read: {error}. Save it again.") from error
    if isinstance(dataset, DatasetDict):
        split = split or ("train" if "train" in dataset else next(iter(dataset)) if len(dataset) == 1 else None)
        if split not in dataset:
            raise DataError(
                f"{path}: split = {split!r} is not in this data set. Found: {', '.join(dataset)}. Set split."
            )
        return ArrowRecords(dataset[split], name=f"{path} ({split})")
    return ArrowRecords(dataset, name=str(path))


__all__ = ["Files"]
