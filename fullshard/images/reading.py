"""Images of records: what a record gives, whether it can be read, and how it is found again when a batch is made.

An image is a path, the bytes of a file, or an image in memory; none is taken for another. Must not know tokens, records
or ranks.
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
"""How the `datasets` library writes an image; it may have both, and then the bytes count."""


UNREADABLE = DropReason(
    "with an image that cannot be read",
    "give images that exist and are complete; relative paths start at data.encode.root (for pairs: "
    "data.encode.image_root), and data.encode.unreadable = error names the first that cannot be read",
)


class Unreadable(DataError):
    """An image that is not there, is damaged, or cannot be given to the model."""


@dataclass(frozen=True)
class Given:
    """An image as a record has it: a path, bytes, or an image in memory."""

    value: Any
    column: str


@dataclass(frozen=True)
class Picture:
    """An image that was read once: where to find it again, and the tokens it takes."""

    data: bytes
    """The path in UTF-8, as the record has it, or the encoded image itself."""
    is_file: bool
    tokens: int


def given(value: Any, column: str) -> Given | None:
    """What a column holds; None where it holds nothing."""
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


def look_at(
    images: Sequence[Given], *, root: Path | None, num_tokens: Callable[[int, int], int]
) -> list[Picture | Unreadable]:
    """Reads every image to its end: damage is found now, and not in the middle of a run."""
    if not images:
        return []

    def look(image: Given) -> Picture | Unreadable:
        try:
            data, size = _look(image, root)
        except MemoryError:
            raise  # says nothing about the image
        except Exception as error:  # every format fails in its own way
            return Unreadable(_complaint(image, error, root))
        try:
            return Picture(data, isinstance(image.value, str), num_tokens(*size))
        except ValueError as error:  # a shape that the model does not take
            return Unreadable(_complaint(image, error, root))

    with quiet(), ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1, len(images))) as pool:
        return list(pool.map(look, images))


def _look(image: Given, root: Path | None) -> tuple[bytes, tuple[int, int]]:
    """What to keep of an image, and its width and height."""
    if isinstance(image.value, str):
        return image.value.encode(), _decoded(place(image.value, root).read_bytes()).size
    if isinstance(image.value, bytes):
        return image.value, _decoded(image.value).size
    upright, file = _upright(image.value), BytesIO()
    upright.save(file, format="PNG")
    return file.getvalue(), upright.size


def read_again(data: bytes, *, is_file: bool, root: Path | None) -> tuple[str, bytes, Image.Image]:
    """What to call an image in an error, the bytes of its file, and the image itself."""
    name = f"the image {place(data.decode(), root)}" if is_file else "an image in the cache of encoded data"
    try:
        encoded = place(data.decode(), root).read_bytes() if is_file else data
        with quiet():
            return name, encoded, _decoded(encoded)
    except Exception as error:
        raise DataError(
            f"{name} cannot be read any more: {reason(error)}. It could when the data was encoded. Put it back, or "
            "remove the folder of data.cache to have all images looked at again."
        ) from error


def place(text: str, root: Path | None) -> Path:
    """Where a path of a record leads to."""
    return root.expanduser() / text if root is not None else Path(text)


def _decoded(data: bytes) -> Image.Image:
    from PIL import Image

    with Image.open(BytesIO(data)) as image:
        return _upright(image)


def _upright(image: Image.Image) -> Image.Image:
    """As Transformers loads it: turned as its camera says, three colours, no transparency."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image).convert("RGB")


@contextmanager
def quiet() -> Iterator[None]:
    """Without what the decoder has to say about odd files; what it cannot read it raises. For all threads at once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def _complaint(image: Given, error: Exception, root: Path | None) -> str:
    fix = "Fix or replace it, or set data.encode.unreadable = skip to leave such records out."
    if not isinstance(image.value, str):
        what = "bytes" if isinstance(image.value, bytes) else "image"
        return f"the {what} of {image.column!r} cannot be read as an image: {reason(error)}. {fix}"
    if isinstance(error, FileNotFoundError) and not Path(image.value).is_absolute():
        fix = f"Relative paths are taken from {root or Path.cwd()}: see data.encode.image_root. {fix}"
    return f"the image {place(image.value, root)} of {image.column!r} cannot be read: {reason(error)}. {fix}"


def reason(error: Exception) -> str:
    """Why something cannot be read, in words that end without a full stop."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "it has no image format that is known"
    told = error.strerror if isinstance(error, OSError) else None
    return (told or str(error) or type(error).__name__).rstrip(".")


def features_of(pictures: Sequence[Picture | None]) -> Features:
    """The images of a sample, one or none for each of its texts, as they are stored."""
    found = [picture for picture in pictures if picture is not None]
    return {
        "images": np.array([picture is not None for picture in pictures], dtype=np.int32),
        "image_sizes": np.array([len(picture.data) for picture in found], dtype=np.int64),
        "image_files": np.array([picture.is_file for picture in found], dtype=bool),
        "image_data": np.frombuffer(b"".join(picture.data for picture in found), dtype=np.uint8),
    }


def stored_in(sample: Features) -> list[tuple[bytes, bool] | None]:
    """The same the other way round: the data of each text's image, and whether it is a path."""
    ends = np.cumsum(sample["image_sizes"])
    found: list[tuple[bytes, bool] | None] = [None] * len(sample["images"])
    for at, text in enumerate(np.flatnonzero(sample["images"])):
        data = sample["image_data"][ends[at] - sample["image_sizes"][at] : ends[at]]
        found[text] = (data.tobytes(), bool(sample["image_files"][at]))
    return found
