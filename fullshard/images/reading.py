"""Images of records: read once to find damage, stored by path or content, and read again for each batch.

An image is a path, the bytes of a file, or an image in memory. Must not know tokens, records or ranks.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fullshard.config.problems import found
from fullshard.contracts.data import DropReason, Features
from fullshard.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

_MOST_THREADS = 8
_HF_KEYS = {"bytes", "path"}
"""The keys of an image of the `datasets` library; bytes win over a path."""

UNREADABLE = DropReason(
    "with an image that cannot be read",
    "give images that exist and are complete; relative paths start at data.encode.root (for pairs: "
    "data.encode.image_root), and data.encode.unreadable = error names the first that cannot be read",
)


class Unreadable(DataError):
    """An image that is missing, damaged, or of a shape that the model does not take."""


@dataclass(frozen=True)
class Given:
    """An image of a record: a path, bytes, or an image in memory."""

    value: Any
    column: str


@dataclass(frozen=True)
class Picture:
    """An image that was read once: how to read it again, and its number of tokens."""

    data: bytes
    """The path in UTF-8, as in the record, or the encoded image."""
    is_file: bool
    tokens: int
    size: tuple[int, int]
    """Width and height."""


def given(value: Any, column: str) -> Given | None:
    """The image in a column, if there is one."""
    if isinstance(value, Mapping) and value and _HF_KEYS.issuperset(value):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if value is None or (isinstance(value, str) and not value):
        return None
    from PIL import Image

    if isinstance(value, (bytearray, memoryview)):
        value = bytes(value)
    if isinstance(value, (bytes, Image.Image)) or (isinstance(value, str) and value.strip()):
        return Given(value, column)
    raise DataError(
        f"{column!r} must be an image (a path, the bytes of a file, or {{bytes: ..., path: ...}}), found "
        f"{found(value)}. Give it an image or null, or remove the record."
    )


def is_empty(value: Any) -> bool:
    """Whether a column holds nothing: null, an empty cell of a table, or an image with only nulls."""
    if isinstance(value, Mapping):
        return all(part is None for part in value.values())
    return value is None or (isinstance(value, (str, list, tuple)) and not value)


def look_at(
    images: Sequence[Given], *, root: Path | None, num_tokens: Callable[[int, int], int]
) -> list[Picture | Unreadable]:
    """Reads every image completely, so that damage is found before training."""
    if not images:
        return []

    def look(image: Given) -> Picture | Unreadable:
        try:
            data, size = _look(image, root)
        except MemoryError:
            raise  # not the image's fault
        except Exception as error:  # depends on the format
            return Unreadable(_complaint(image, error, root))
        try:
            return Picture(data, isinstance(image.value, str), num_tokens(*size), size)
        except ValueError as error:  # a shape that the model does not take
            return Unreadable(_complaint(image, error, root))

    with quiet(), ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1, len(images))) as pool:
        return list(pool.map(look, images))


def _look(image: Given, root: Path | None) -> tuple[bytes, tuple[int, int]]:
    """What is stored of an image, and its width and height."""
    if isinstance(image.value, str):
        return image.value.encode(), _decoded(place(image.value, root).read_bytes()).size
    if isinstance(image.value, bytes):
        return image.value, _decoded(image.value).size
    upright, file = _upright(image.value), BytesIO()
    upright.save(file, format="PNG")
    return file.getvalue(), upright.size


def read_again(data: bytes, *, is_file: bool, root: Path | None) -> tuple[str, bytes, Image.Image]:
    """The name of an image in errors, the bytes of its file, and the image."""
    name = f"the image {place(data.decode(), root)}" if is_file else "an image in the cache of encoded data"
    try:
        encoded = place(data.decode(), root).read_bytes() if is_file else data
        with quiet():
            return name, encoded, _decoded(encoded)
    except Exception as error:
        raise DataError(
            f"{name} cannot be read any more: {reason(error)}. It was readable when the data was encoded. Restore it, "
            "or delete the folder of data.cache to check all images again."
        ) from error


def place(text: str, root: Path | None) -> Path:
    """A path of a record, relative to `root`."""
    return root.expanduser() / text if root is not None else Path(text)


def _decoded(data: bytes) -> Image.Image:
    from PIL import Image

    with Image.open(BytesIO(data)) as image:
        return _upright(image)


def _upright(image: Image.Image) -> Image.Image:
    """As Transformers loads it: rotated by its EXIF tag, RGB, no transparency."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image).convert("RGB")


@contextmanager
def quiet() -> Iterator[None]:
    """Without the decoder's warnings, in all threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def _complaint(image: Given, error: Exception, root: Path | None) -> str:
    fix = "Fix or replace it, or set data.encode.unreadable = skip to leave those records out."
    if not isinstance(image.value, str):
        what = "bytes" if isinstance(image.value, bytes) else "image"
        return f"the {what} of {image.column!r} cannot be read as an image: {reason(error)}. {fix}"
    if isinstance(error, FileNotFoundError) and not Path(image.value).is_absolute():
        fix = f"Relative paths are taken from {root or Path.cwd()}: see data.encode.image_root. {fix}"
    return f"the image {place(image.value, root)} of {image.column!r} cannot be read: {reason(error)}. {fix}"


def reason(error: Exception) -> str:
    """Why something cannot be read, without a full stop."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "unknown image format"
    known = error.strerror if isinstance(error, OSError) else None
    return (known or str(error) or type(error).__name__).rstrip(".")


def features_of(pictures: Sequence[Picture | None]) -> Features:
    """The images of a sample as features; each of its texts has one or none."""
    found = [picture for picture in pictures if picture is not None]
    return {
        "images": np.array([picture is not None for picture in pictures], dtype=np.int32),
        "image_sizes": np.array([len(picture.data) for picture in found], dtype=np.int64),
        "image_files": np.array([picture.is_file for picture in found], dtype=bool),
        "image_data": np.frombuffer(b"".join(picture.data for picture in found), dtype=np.uint8),
    }


def stored_in(sample: Features) -> list[tuple[bytes, bool] | None]:
    """The inverse: the data of each text's image, and whether it is a path."""
    ends = np.cumsum(sample["image_sizes"])
    found: list[tuple[bytes, bool] | None] = [None] * len(sample["images"])
    for at, text in enumerate(np.flatnonzero(sample["images"])):
        data = sample["image_data"][ends[at] - sample["image_sizes"][at] : ends[at]]
        found[text] = (data.tobytes(), bool(sample["image_files"][at]))
    return found
