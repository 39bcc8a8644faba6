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
from fullshard.families.audio.reading import UNREADABLE, Clip, Unreadable, look_at
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
    given = read_given(values)
    found = look_at(given, root=root, rate=processor.rate)
    clips = [clip for clip in found if isinstance(clip, Clip)]
    if damaged := [clip for clip in found if isinstance(clip, Unreadable)]:
        if not of_record:
            raise damaged[0]
        root_set = " (data.encode.audio_root)" if "Relative paths" in str(damaged[0]) else ""
        fix = "Fix or replace it, or set data.encode.unreadable = skip to leave such records out."
        raise Unreadable(f"{str(damaged[0]).rstrip('.')}{root_set}. {fix}")
    for clip, each in zip(clips, given, strict=True):
        seconds = clip.samples / processor.rate
        name = f"{each.where} ({each.value})" if isinstance(each.value, str) else each.where
        skip = ", or set data.encode.too_long = skip to leave such records out" if of_record else ""
        if max_seconds is not None and seconds > max_seconds:
            raise TooLong(
                f"{name} has {seconds:.1f} seconds, but data.encode.max_seconds = {max_seconds:g}. Cut it, raise "
                f"max_seconds{skip}."
            )
        if processor.longest is not None and clip.samples > processor.longest:
            most = processor.longest / processor.rate
            raise TooLong(
                f"{name} has {seconds:.1f} seconds, but the model takes {most:g} and ignores the rest. Cut it{skip}."
            )
    return clips


__all__ = ["ClipRules", "kept_or_dropped", "read_clips"]
