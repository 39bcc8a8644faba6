"""Reads an image or latent into an array (channels, height, width).

Integers are pixels from 0 to 255 and become uint8; floats are a latent and become float32. Must not know records,
labels, batches or ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fullshard.errors import DataError
from fullshard.images.reading import Unreadable, place, reason

if TYPE_CHECKING:
    from PIL import Image

_NPY = b"\x93NUMPY"
_GREY = ("1", "L", "LA")
_DEEP = ("I", "F")
"""Prefixes of image modes with more than 8 bits per channel."""
_FIX = "Fix or replace it, or set data.encode.unreadable = skip to leave those records out."


@dataclass(frozen=True)
class Picture:
    """An image or latent, and its name in errors."""

    name: str
    values: np.ndarray

    @property
    def is_latent(self) -> bool:
        return bool(self.values.dtype == np.float32)

    def fingerprint(self) -> int:
        """64 bits of a hash of the content."""
        found = hashlib.blake2b(f"{self.values.dtype}{self.values.shape}".encode(), digest_size=8)
        found.update(self.values.tobytes())
        return int.from_bytes(found.digest(), "little", signed=True)


def floats(values: np.ndarray) -> np.ndarray:
    """Pixels scaled to -1 to 1; latents unchanged."""
    return values if values.dtype == np.float32 else values.astype(np.float32) / np.float32(127.5) - np.float32(1)


def read(value: Any, column: str, *, root: Path | None, size: int | None, channels: Literal[1, 3] | None) -> Picture:
    """Reads a path, the bytes of a file, an image or an array. Raises DataError; Unreadable if the content is missing
    or damaged."""
    from PIL import Image

    name = _name(value, column, root)
    try:
        found = _opened(value, root)
    except MemoryError:
        raise  # not the file's fault
    except Exception as error:  # depends on the format
        hint = ""
        if isinstance(error, FileNotFoundError) and not Path(value).is_absolute():
            hint = f" Relative paths are taken from {root or Path.cwd()}: see data.encode.root."
        raise Unreadable(f"{name} cannot be read: {reason(error)}.{hint} {_FIX}") from error
    if not isinstance(found, Image.Image) and found.dtype.kind == "f":
        for setting, wanted in (("size", size), ("channels", channels)):
            if wanted is not None:
                raise DataError(
                    f"{name} is a latent, but data.encode.{setting} = {wanted} is for images. Leave that setting out."
                )
        return Picture(name, _latent(found, name))
    image = found if isinstance(found, Image.Image) else _image(found, name)
    return Picture(name, _pixels(image, name, size=size, channels=channels))


def _name(value: Any, column: str, root: Path | None) -> str:
    if isinstance(value, str):
        return f"the file {place(value, root)} of {column!r}"
    what = "bytes" if isinstance(value, bytes) else "array" if isinstance(value, (np.ndarray, list)) else "image"
    return f"the {what} of {column!r}"


def _opened(value: Any, root: Path | None) -> np.ndarray | Image.Image:
    """An array, or a complete image rotated by its EXIF tag."""
    from PIL import Image, ImageOps

    if isinstance(value, (np.ndarray, list)):
        try:
            return np.asarray(value)
        except ValueError:
            raise ValueError("its rows are not equally long") from None
    if isinstance(value, (str, bytes)):
        data = place(value, root).read_bytes() if isinstance(value, str) else value
        if data.startswith(_NPY) or (isinstance(value, str) and value.lower().endswith(".npy")):
            # Not np.load, which takes a damaged file for a pickle.
            return np.asarray(np.lib.format.read_array(BytesIO(data), allow_pickle=False))
        value = Image.open(BytesIO(data))
    return ImageOps.exif_transpose(value)


def _latent(values: np.ndarray, name: str) -> np.ndarray:
    if values.ndim == 4 and len(values) == 1:
        values = values[0]
    if values.ndim != 3 or not values.size:
        raise DataError(
            f"{name} holds floats in the shape {values.shape}, but a latent is (channels, height, width), optionally "
            "after a 1. Save it in that shape; an image in an array has integers from 0 to 255."
        )
    with np.errstate(over="ignore"):
        latent = values.astype(np.float32)
    wrong = int(latent.size - np.isfinite(latent).sum())
    if wrong:
        raise Unreadable(
            f"{name} is a latent of {latent.size:,} values, and {wrong:,} of them {'is' if wrong == 1 else 'are'} NaN "
            f"or infinite in float32. {_FIX}"
        )
    return latent


def _image(values: np.ndarray, name: str) -> Image.Image:
    from PIL import Image

    is_flat = values.ndim == 2
    if (
        values.dtype.kind not in "iu"
        or not values.size
        or not (is_flat or (values.ndim == 3 and values.shape[2] in (1, 3, 4)))
    ):
        raise DataError(
            f"{name} holds {values.dtype} in the shape {values.shape}, but an image in an array has integers in the "
            "shape (height, width) or (height, width, channels) with 1, 3 or 4 channels, and a latent has floats, such "
            "as float32, in the shape (channels, height, width). Save it in one of these forms."
        )
    least, most = values.min(), values.max()
    if least < 0 or most > 255:
        raise DataError(
            f"{name} goes from {least} to {most}, but pixels go from 0 to 255. Rescale it, or save it as float32 "
            "in the shape (channels, height, width) to use it unchanged."
        )
    pixels = values.astype(np.uint8)
    return Image.fromarray(pixels if is_flat or values.shape[2] > 1 else pixels[:, :, 0])


def _pixels(image: Image.Image, name: str, *, size: int | None, channels: int | None) -> np.ndarray:
    if image.mode.startswith(_DEEP):
        # The decoder would clip values above 255.
        raise DataError(
            f"{name} is an image of mode {image.mode!r}: more than 8 bits per channel, but pixels go from 0 to 255. "
            "Save it with 8 bits per channel."
        )
    grey = image.mode in _GREY if channels is None else channels == 1
    image = image.convert("L" if grey else "RGB")
    if size is not None:
        image = _cropped(image, size)
    values = np.asarray(image)
    return np.ascontiguousarray(values[None] if grey else values.transpose(2, 0, 1))


def _cropped(image: Image.Image, size: int) -> Image.Image:
    """The shorter side resized to `size`, and the middle of the other: as torchvision's Resize and CenterCrop do."""
    from PIL import Image

    short = min(image.size)
    width, height = (size * side // short for side in image.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    # Antialiased, whether it is enlarged or reduced.
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    return resized.crop((left, top, left + size, top + size))


__all__ = ["Picture", "floats", "read"]
