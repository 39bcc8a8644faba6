"""Pictures of screens: a file, the bytes of one, or a frame of a video. Frames need PyAV, imported on first use.

Images are read by `fullshard.images.reading`. Must not know rows, tokens or ranks.
"""

from __future__ import annotations

import base64
import binascii
import functools
import io
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.config.problems import found
from fullshard.errors import DataError, missing_package
from fullshard.families.vision.desktop.events import ImageRef
from fullshard.families.vision.image_samples import ORIGIN
from fullshard.images.reading import Given, Unreadable, place, read_again, reason

if TYPE_CHECKING:
    from PIL import Image

COLUMN = "screen"
"""What errors call the image."""
_SECOND = 10**9
_FAR = 2
"""Seconds: a frame further ahead than this is reached by seeking a key frame, not by decoding all frames between."""
_OPEN_VIDEOS = 4


def reference(message: Mapping[str, Any]) -> ImageRef:
    """Where the picture of a screen message is: `media_ref: {uri, pts_ns}`."""
    media = message.get("media_ref")
    uri = media.get("uri") if isinstance(media, Mapping) else None
    if not isinstance(media, Mapping) or not isinstance(uri, str) or not uri.strip():
        raise DataError(
            f"a screen needs its picture in media_ref: {{uri: ..., pts_ns: ...}}, found media_ref = {found(media)}. "
            "Give the path of an image, a data URI, or a video with a position (pts_ns), or remove the row."
        )
    if uri.startswith("data:"):
        return _embedded(uri)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", uri) and not uri.startswith("file://"):
        raise DataError(
            f"media_ref.uri = {found(uri)} is a URL, and screens are not downloaded. Download the file and give its "
            "path."
        )
    path, position = uri.removeprefix("file://"), media.get("pts_ns")
    if position is None:
        return path
    if isinstance(position, bool) or not isinstance(position, int) or position < 0:
        raise DataError(
            f"media_ref.pts_ns = {found(position)}: it must be a whole number of nanoseconds from the start of the "
            "video, or null for an image. Fix it or remove the row."
        )
    return path, position


def _embedded(uri: str) -> bytes:
    head, comma, data = uri.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("it does not begin with data:image/png;base64,")
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(
            f"media_ref.uri = {found(uri)}: this data URI cannot be read: {error}. Write the image again as "
            "data:image/png;base64,..., or give its path."
        ) from error


def located(ref: ImageRef, *, root: Path | None, episode_path: str) -> ImageRef:
    """A reference whose path starts at `root`. In the row it starts there or, as recorders write it, beside its
    episode."""
    if isinstance(ref, bytes):
        return ref
    path = ref if isinstance(ref, str) else ref[0]
    at = _located(path, root, episode_path)
    return at if isinstance(ref, str) else (at, ref[1])


@functools.lru_cache(maxsize=1024)
def _located(path: str, root: Path | None, episode_path: str) -> str:
    tried = [path, str(Path(episode_path).parent / path)]
    for one in tried:
        if place(one, root).is_file():
            return one
    places = dict.fromkeys(str(place(one, root).absolute()) for one in tried)
    raise Unreadable(
        f"the screen {path!r} of the episode {episode_path!r} does not exist. Looked for: {' and '.join(places)}. "
        "Check the path; relative paths start at data.encode.image_root or at the folder of the episode."
    )


def given(ref: ImageRef, *, root: Path | None) -> Given:
    """A located screen for `images.reading.look_at`, which reads it to the end. A frame of a video is decoded here; its
    PNG says where it is from."""
    if not isinstance(ref, tuple):
        return Given(ref, COLUMN)
    from PIL.PngImagePlugin import PngInfo

    origin, file = PngInfo(), io.BytesIO()
    origin.add_text(ORIGIN, f"{ref[0]} at {ref[1] / _SECOND:.3f} s")
    _frame(*ref, root=root).save(file, format="PNG", pnginfo=origin)
    return Given(file.getvalue(), COLUMN)


def load(ref: ImageRef, *, root: Path | None) -> Image.Image:
    """A located screen as an image."""
    if isinstance(ref, tuple):
        return _frame(*ref, root=root)
    data = ref.encode() if isinstance(ref, str) else ref
    return read_again(data, is_file=isinstance(ref, str), root=root)[2]


def _frame(path: str, position_ns: int, *, root: Path | None) -> Image.Image:
    # By process: a forked worker must not share the file position of its parent.
    return _video(str(place(path, root)), os.getpid()).image_at(position_ns)


@functools.lru_cache(maxsize=_OPEN_VIDEOS)
def _video(path: str, process: int) -> _Video:
    return _Video(path)


class _Video:
    """An open video. Frames are shown until the next one; positions in order are decoded without seeking."""

    _shown: Any
    _next: Any

    def __init__(self, path: str) -> None:
        try:
            import av
        except ImportError as error:
            raise missing_package("av", extra="video", needed_by=f"a screen in a video ({path})") from error
        self._path, self._lock, self._errors = path, threading.Lock(), (av.FFmpegError, OSError, ValueError)
        try:
            self._container = av.open(path)
            if not self._container.streams.video:
                raise ValueError("it has no pictures")
            self._stream: Any = self._container.streams.video[0]
            self._tick_ns = float(self._stream.time_base) * _SECOND
            self._rewind(0)
        except self._errors as error:
            raise self._unreadable(error) from error

    def image_at(self, position_ns: int) -> Image.Image:
        """The frame that is shown at a position."""
        with self._lock:
            try:
                image: Image.Image = self._find(position_ns).to_image()
                return image
            except self._errors as error:
                raise self._unreadable(error) from error

    def _find(self, position_ns: int) -> Any:
        # Positions are rounded to the clock of the video, as they were when it was written.
        target = round(position_ns / self._tick_ns)
        if self._shown is None or target < self._shown.pts or target - self._shown.pts > _FAR * _SECOND / self._tick_ns:
            self._rewind(target)
            if self._shown is not None and self._shown.pts > target:  # no key frame before it
                self._rewind(0)
        while self._next is not None and self._next.pts <= target:
            self._shown, self._next = self._next, next(self._frames, None)
        if self._shown is None or (self._next is None and target >= self._end()):
            end = 0 if self._shown is None else self._end() * self._tick_ns
            raise Unreadable(
                f"the video {self._path} ends at {end / _SECOND:.3f} s, but a screen is at {position_ns / _SECOND:.3f} "
                f"s (pts_ns = {position_ns}). Check that it is the video of this recording and that it is complete."
            )
        return self._shown

    def _rewind(self, target: int) -> None:
        """To the last key frame at or before a target."""
        self._container.seek(target, stream=self._stream, backward=True)
        self._frames: Iterator[Any] = self._container.decode(self._stream)
        self._shown = next(self._frames, None)
        self._next = next(self._frames, None)

    def _end(self) -> float:
        rate = self._stream.average_rate
        length = self._shown.duration or (_SECOND / float(rate) / self._tick_ns if rate else 1)
        return float(self._shown.pts + length)

    def _unreadable(self, error: Exception) -> Unreadable:
        return Unreadable(
            f"the video {self._path} cannot be read: {reason(error)}. Give a complete video file, or remove the rows "
            "of its episode."
        )
