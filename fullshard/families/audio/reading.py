"""Audio of records: read once to find damage, stored by path or content, and read again for each batch.

A clip is a path, the bytes of a file (wav, flac, ogg, mp3), or samples with their rate. Everything becomes mono at the
model's rate. Must not know tokens, records or ranks.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.config.problems import found, sort_of
from fullshard.contracts.data import DropReason
from fullshard.errors import DataError, SetupError, missing_package

_LOUDEST = 8.0
"""Samples as floats are within -1 and 1; resampling overshoots a little. More is a wrong scale."""
FILES = "a path, the bytes of a file, {bytes: ..., path: ...} or {array: ..., sampling_rate: ...}"

UNREADABLE = DropReason(
    "with audio that cannot be read",
    "give clips that exist and are complete, with samples that are numbers; relative paths start at "
    "data.encode.audio_root, and data.encode.unreadable = error names the first that cannot be read",
)


class Unreadable(DataError):
    """A clip that is missing, damaged, empty, or without usable samples."""


@dataclass(frozen=True)
class Clip:
    """A clip that was read once: how to read it again, and its length."""

    data: bytes
    """The path in UTF-8, as in the record, or the bytes of a file."""
    is_file: bool
    samples: int
    """At the model's rate."""


@dataclass(frozen=True)
class Given:
    """A clip of a record: a path or the bytes of a file, and the rate that the record says it has."""

    value: str | bytes
    rate: int | None
    where: str


def given(value: Any, where: str, *, rate: Any = None) -> Given:
    """One clip as it can be read; samples become the bytes of a file."""
    if isinstance(value, Mapping):
        return _from_mapping(value, where)
    if isinstance(value, str) and value.startswith("data:"):
        value = _from_base64(value.partition(",")[2], where)
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        raise DataError(f"{where} is a URL ({value[:80]}), and nothing is downloaded. Download it and give its path.")
    if isinstance(value, (bytearray, memoryview)):
        value = bytes(value)
    if isinstance(value, str) and value.strip():
        return Given(value.removeprefix("file://"), _rate(rate, where) if rate is not None else None, where)
    if isinstance(value, bytes) and value:
        return Given(value, _rate(rate, where) if rate is not None else None, where)
    if isinstance(value, (np.ndarray, Sequence)) and not isinstance(value, (str, bytes)):
        return Given(_as_file(value, where, rate=rate), None, where)
    raise DataError(f"{where} must be {FILES}; found {found(value)}.")


def _from_mapping(value: Mapping[str, Any], where: str) -> Given:
    """What the `datasets` library stores, or a part of a message."""
    rate = value.get("sampling_rate")
    for key in ("array", "bytes", "path", "audio", "audio_url", "url", "file"):
        if value.get(key) is not None:
            return given(value[key], where, rate=rate)
    encoded = next((value[key] for key in ("base64", "data") if isinstance(value.get(key), str)), None)
    if encoded is None:
        raise DataError(f"{where} must be {FILES}; found {found(dict(value))}.")
    return given(_from_base64(encoded, where), where)


def _from_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{where}: its base64 cannot be decoded ({error}). Encode it again.") from error


def _rate(rate: Any, where: str) -> int:
    if isinstance(rate, str) and rate.strip().isdigit():
        rate = int(rate)  # csv files hold numbers as text
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 1000 <= rate <= 400_000:
        raise DataError(f"{where}: sampling_rate must be samples per second, such as 16000; found {found(rate)}.")
    return int(rate)


def _as_file(samples: Any, where: str, *, rate: Any) -> bytes:
    """Samples as the bytes of a file that holds them exactly, in fp32."""
    if rate is None:
        raise DataError(f"{where} has samples but no sampling_rate. Add the column, or give files.")
    rate = _rate(rate, where)
    file = BytesIO()
    _soundfile().write(file, _floats(samples, where), rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


def _floats(samples: Any, where: str) -> np.ndarray:
    """(samples,) or (samples, channels) in fp32, from floats or integers of a known width."""
    try:
        array = np.asarray(samples)
    except ValueError as error:
        raise DataError(f"{where}: the lists of samples have different lengths ({error}).") from error
    if array.dtype.kind not in "iuf" or array.ndim not in (1, 2):
        shape = f"{array.ndim} dimensions" if array.dtype.kind in "iuf" else _not_a_number(array)
        raise DataError(f"{where} must be a list of numbers, one for each sample (or each channel); found {shape}.")
    if array.size == 0:
        raise Unreadable(f"{where} has no samples.")
    if array.dtype.kind in "iu":
        array = array / _full_scale(array, where)
    if array.ndim == 2 and array.shape[0] < array.shape[1]:
        array = array.T  # channels first
    return np.ascontiguousarray(array, dtype=np.float32)


def _not_a_number(array: np.ndarray) -> str:
    """The first value that is not a number, and its place."""
    values = array.reshape(-1).tolist()
    at = next(at for at, value in enumerate(values) if isinstance(value, bool) or not isinstance(value, (int, float)))
    return f"{sort_of(values[at])} (sample {at + 1:,})"


def _full_scale(array: np.ndarray, where: str) -> float:
    """The largest value of whole numbers; lists of them have no width, and 16 bits are the usual one."""
    if array.dtype in (np.int8, np.int16):
        return float(-int(np.iinfo(array.dtype).min))
    most = int(np.abs(array.astype(np.int64)).max())
    if array.dtype == np.int32 and most > 32768:
        return 2.0**31
    if most > 32768:
        raise DataError(f"{where} has whole numbers up to {most:,}; 16-bit samples end at 32,768. Give floats instead.")
    return 32768.0


def look_at(clips: Sequence[Given], *, root: Path | None, rate: int) -> list[Clip | Unreadable]:
    """Reads every clip completely, so that damage is found before training."""
    return [_look(clip, root, rate) for clip in clips]


def _look(clip: Given, root: Path | None, rate: int) -> Clip | Unreadable:
    is_file = isinstance(clip.value, str)
    name = f"the file {place(clip.value, root)}" if isinstance(clip.value, str) else "its content"
    try:
        samples, own = _decoded(_opened(clip.value, root), rate)
    except (MemoryError, SetupError):
        raise  # not the clip's fault
    except Exception as error:  # depends on the format
        missing = isinstance(error, FileNotFoundError) and not Path(str(clip.value)).is_absolute()
        start = f" Relative paths are taken from {root or Path.cwd()}." if missing else ""
        return Unreadable(f"{clip.where}: {name} cannot be read: {_reason(error)}.{start}")
    if clip.rate not in (None, own):
        raise DataError(
            f"{clip.where}: the record says sampling_rate = {clip.rate}, but {name} has {own} samples per second. "
            "Correct the record, or leave sampling_rate out."
        )
    data = clip.value.encode() if isinstance(clip.value, str) else clip.value
    return Clip(data, is_file, len(samples))


def read_again(data: bytes, *, is_file: bool, root: Path | None, rate: int) -> np.ndarray:
    """The samples of a clip, mono at this rate."""
    value = data.decode() if is_file else data
    name = f"the audio file {place(data.decode(), root)}" if is_file else "a clip in the cache of encoded data"
    try:
        return _decoded(_opened(value, root), rate)[0]
    except SetupError:
        raise
    except Exception as error:
        raise DataError(
            f"{name} can no longer be read: {_reason(error)}. It could when the data was encoded. Restore it, "
            "or delete the folder of data.cache to check all audio again."
        ) from error


def recorded(data: bytes, *, is_file: bool, root: Path | None) -> tuple[int, int]:
    """The rate of a clip, and its number of channels."""
    found = _soundfile().info(_opened(data.decode() if is_file else data, root))
    return int(found.samplerate), int(found.channels)


def place(text: str, root: Path | None) -> Path:
    """A path of a record, relative to `root`."""
    return root.expanduser() / text if root is not None else Path(text)


def _opened(value: str | bytes, root: Path | None) -> BytesIO:
    return BytesIO(place(value, root).read_bytes() if isinstance(value, str) else value)


def _decoded(file: BytesIO, rate: int) -> tuple[np.ndarray, int]:
    """The samples of a file, mono at this rate, and the file's own rate."""
    with _soundfile().SoundFile(file) as opened:
        samples, own, promised = opened.read(dtype="float32", always_2d=True), opened.samplerate, opened.frames
    if not len(samples):
        raise ValueError("it has no samples")
    if _is_cut(file.getbuffer(), found=len(samples), promised=promised):
        raise ValueError("it is cut off: it ends before the length that it states")
    if not np.isfinite(samples).all():
        raise ValueError("it has samples that are NaN or infinite")
    if (loudest := float(np.abs(samples).max())) > _LOUDEST:
        raise ValueError(f"it has samples up to {loudest:,.0f}, and floats must be between -1 and 1")
    mono = samples.mean(axis=1)
    if own != rate:
        mono = _soxr().resample(mono, own, rate)
    if not len(mono):
        raise ValueError(f"it has no samples at {rate} samples per second")
    return np.ascontiguousarray(mono, dtype=np.float32), int(own)


def _is_cut(content: memoryview, *, found: int, promised: int) -> bool:
    """Whether a file is shorter than it states; many state nothing, such as recordings from a pipe."""
    stated, begin = int.from_bytes(content[4:8], "little"), bytes(content[:8192])
    if begin.startswith(b"RIFF"):
        return 0 < stated < 0xFFFFFFFF - 8 and stated + 8 > len(content) + 1
    if begin.startswith(b"OggS"):
        page = bytes(content[-70_000:])  # a page has at most 65,307 bytes
        page = page[page.rfind(b"OggS") :]
        return len(page) < 27 or len(page) < 27 + page[26] + sum(page[27 : 27 + page[26]])
    # Without this header the length of an mp3 file is a guess.
    return (b"Xing" in begin or b"Info" in begin) and found < 0.99 * promised


def _reason(error: Exception) -> str:
    if (known := getattr(error, "error_string", None)) is not None:
        return f"it is damaged, or not a wav, flac, ogg or mp3 file ({str(known).rstrip('.')})"
    known = error.strerror if isinstance(error, OSError) else None
    return (known or str(error) or type(error).__name__).rstrip(".")


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: the package without its C library
        raise missing_package("soundfile", extra="audio", needed_by="reading audio") from error
    return soundfile


def _soxr() -> Any:
    try:
        import soxr
    except ImportError as error:
        raise missing_package("soxr", extra="audio", needed_by="resampling audio") from error
    return soxr


__all__ = ["UNREADABLE", "Clip", "Given", "Unreadable", "given", "look_at", "place", "read_again", "recorded"]
