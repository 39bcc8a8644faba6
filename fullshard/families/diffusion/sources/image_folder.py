"""A folder of class folders with images or latents; the number of the class folder is the label.

Reads names only. Must not know what is in an image, batches or ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import field_validator

from fullshard.contracts.data import Record, Records, Source
from fullshard.data.records import Joined, Listed, combine
from fullshard.errors import DataError
from fullshard.formatting.plural import counted

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".npy", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

_MOST_NAMED = 12


class ImageFolder(Source):
    """Files (`path`) and their classes (`label`), by name; without class folders there are no labels."""

    path: Path
    """The folder; class folders may have subfolders. Files are images or .npy latents."""
    classes: list[str] | None = None
    """The class folders, in the order of their labels; null: all, by name. Name them if data.train and
    data.validation have different ones."""

    @field_validator("classes")
    @classmethod
    def _once(cls, classes: list[str] | None) -> list[str] | None:
        if classes is not None and (not classes or len(set(classes)) < len(classes)):
            raise ValueError("each class folder is named once, and at least one is")
        return classes

    def open(self) -> Records:
        folder = self.path.expanduser().absolute()
        if not folder.is_dir():
            there = "this is a file" if folder.exists() else "no such folder"
            raise DataError(f"{folder}: {there}, but image_folder needs a folder of class folders. Check the path.")
        inside = sorted(child for child in folder.iterdir() if not child.name.startswith("."))
        found = [child.name for child in inside if child.is_dir()]
        names = found if self.classes is None else self.classes
        loose = [child for child in inside if _is_image(child) and child.is_file()]
        if names and loose:
            raise DataError(
                f"{folder}: {loose[0].name} and {counted(len(loose) - 1, 'other file')} are beside the class folders, "
                "so their class is unknown. Move them into a class folder, or out of the folder."
            )
        rows: list[Record] = [{"path": str(file)} for file in loose]
        left_out = [child.name for child in inside if child.name not in names and not _is_image(child)]
        for label, name in enumerate(names):
            files = list(_files(folder / name)) if name in found else []
            images = [file for file in files if _is_image(file)]
            if not images:
                problem = f"has no image ({', '.join(SUFFIXES)})" if name in found else "does not exist"
                raise DataError(
                    f"{folder}: the class folder {name!r} {problem}. Class folders found: {_some(found) or 'none'}. "
                    "Put images into it, or say which folders are classes: classes = [NAME, ...]."
                )
            rows += [{"path": str(file), "label": label} for file in images]
            left_out += [file.name for file in files if not _is_image(file)]
        if not rows:
            raise DataError(
                f"{folder}: no image in this folder. Found: {_some(left_out) or 'nothing'}. Allowed: "
                f"{', '.join(SUFFIXES)}, in class folders or without any."
            )
        said = _some([f"{label} = {name}" for label, name in enumerate(names)])
        notes = [f"{folder}: labels {said}" if names else f"{folder}: no class folders, so no labels"]
        if left_out:
            notes.append(f"{folder}: left out, no images of a class: {_some(left_out)}")
        return Joined([_listed(rows)], notes=notes)


def _listed(rows: list[Record]) -> Listed:
    return Listed(
        rows,
        where=lambda index: str(rows[index]["path"]),
        fingerprint=lambda: combine("image_folder", *map(_stamp, rows)),
    )


def _files(folder: Path) -> Iterator[Path]:
    """All files under a folder, by name, without hidden ones."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def _stamp(row: Record) -> str:
    """By size and time: hashing every image would take as long as encoding them."""
    stat = os.stat(row["path"])
    return f"{row['path']} {stat.st_size} {stat.st_mtime_ns} {row.get('label')}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")


__all__ = ["ImageFolder"]
