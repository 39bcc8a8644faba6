"""What happens to clips that cannot be used: an error that names the record, or the record is left out and counted.

Must not know conversations, tokens or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fullshard.contracts.data import DropReason, Encoded, Encoder
from fullshard.families.audio.processor import AudioProcessor
from fullshard.families.audio.reading import UNREADABLE, Clip, Given, Unreadable, look_at
from fullshard.families.audio.record_audio import read_given
from fullshard.multimodal.media_chat import TooLong

TOO_LONG = DropReason(
    "with clips longer than data.encode.max_seconds or the model takes, or that do not fit into data.sequence_length",
    "cut the clips, or raise data.encode.max_seconds or data.sequence_length",
)


class ClipRules(Encoder):
    """The settings of every encoder of records with audio."""

    audio_root: Path | None = None
    """Where relative paths of clips start; null: the working directory."""
    max_seconds: float | None = Field(None, gt=0)
    """The longest clip that is accepted; null: as long as the model takes."""
    unreadable: Literal["error", "skip"] = "error"
    """A clip that is missing, damaged or empty stops the run, or its record is left out and counted."""
    too_long: Literal["error", "skip"] = "error"
    """The same for a record with a clip that is too long, or whose clips do not fit into data.sequence_length."""


def kept_or_dropped(encode: Callable[[], Encoded], settings: ClipRules) -> Encoded:
    """What `encode` gives; a record that must not be used is an error or dropped, as the settings say."""
    try:
        return encode()
    except Unreadable:
        if settings.unreadable == "error":
            raise
        return Encoded(dropped=[UNREADABLE])
    except TooLong:
        if settings.too_long == "error":
            raise
        return Encoded(dropped=[TOO_LONG])


def read_clips(
    values: Sequence[Any],
    processor: AudioProcessor,
    *,
    root: Path | None,
    max_seconds: float | None,
    of_record: bool = True,
) -> list[Clip]:
    """The clips of a record, or of a prompt, all of which can be used."""
    try:
        given = read_given(values)
        clips = _readable(given, processor, root=root)
    except Unreadable as error:
        raise _with_advice(error) if of_record else error from error.__cause__
    for clip, each in zip(clips, given, strict=True):
        seconds = clip.samples / processor.rate
        skip = ", or set data.encode.too_long = skip to leave such records out" if of_record else ""
        if max_seconds is not None and seconds > max_seconds:
            raise TooLong(
                f"{_name(each)} has {seconds:.1f} seconds, but data.encode.max_seconds = {max_seconds:g}. Cut it, "
                f"raise max_seconds{skip}."
            )
        if processor.longest is not None and clip.samples > processor.longest:
            most = processor.longest / processor.rate
            raise TooLong(
                f"{_name(each)} has {seconds:.1f} seconds, but the model takes {most:g} and ignores the rest. Cut "
                f"it{skip}."
            )
    return clips


def _readable(given: Sequence[Given], processor: AudioProcessor, *, root: Path | None) -> list[Clip]:
    clips = list[Clip]()
    for each, clip in zip(given, look_at(given, root=root, rate=processor.rate), strict=True):
        if isinstance(clip, Unreadable):
            raise clip
        if not processor.takes(clip.samples):
            raise Unreadable(f"{_name(each)} is too short: {clip.samples:,} samples at {processor.rate:,} Hz.")
        clips.append(clip)
    return clips


def _name(clip: Given) -> str:
    return f"{clip.where} ({clip.value})" if isinstance(clip.value, str) else clip.where


def _with_advice(error: Unreadable) -> Unreadable:
    root = " (data.encode.audio_root)" if "Relative paths" in str(error) else ""
    fix = "Fix or replace it, or set data.encode.unreadable = skip to leave such records out."
    return Unreadable(f"{str(error).rstrip('.')}{root}. {fix}")


__all__ = ["ClipRules", "kept_or_dropped", "read_clips"]
