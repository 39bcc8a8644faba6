"""The clips of a record, in the order of its conversation, and the record as a conversation.

A clip is in a part of a message, or in a column: `audio_path`, `audio_array` with `sampling_rate`, or `audio` as the
`datasets` library stores it; a text may mark its place with `<audio>`. Must not know templates, tokens or ranks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fullshard.config.problems import sort_of
from fullshard.contracts.data import Record
from fullshard.errors import DataError
from fullshard.families.audio.reading import Given, given
from fullshard.formatting.plural import counted
from fullshard.multimodal.parts import Medium

COLUMNS = ("audio_path", "audio_paths", "audio_array", "audio_arrays", "audio", "audios")
RATE = "sampling_rate"
MEDIUM = Medium(
    "audio", "clip", "<audio>", ("audio", "audio_url", "input_audio"), ("audio", "audio_url", "input_audio"), whole=True
)
NUMBERED = re.compile(r"<\|audio_\d+\|>")
"""How Phi-4 numbers clips in a text."""


def audio_columns(record: Record) -> list[str]:
    """The columns with clips; in a table, an empty text or NaN means no clip."""
    return [key for key in COLUMNS if record.get(key) is not None and not _is_blank(record[key])]


def column_clips(record: Record) -> list[Any]:
    """The clips of the record's own column, in order."""
    columns = audio_columns(record)
    if {"audio_path", "audio_array"} == set(columns):
        columns = ["audio_array"]  # the path says where the samples come from
    if len(columns) > 1:
        raise DataError(f"the record has both {' and '.join(map(repr, columns))}. Keep one of them.")
    if not columns:
        return []
    value, rate = record[columns[0]], record.get(RATE)
    if columns[0].startswith("audio_array"):
        value = _listed(value, columns[0])
        clips = value if columns[0].endswith("s") or _is_list_of_arrays(value) else [value]
        rates = rate if isinstance(rate, (list, tuple)) else [rate] * len(clips)
        if len(rates) != len(clips):
            raise DataError(f"the record has {counted(len(clips), 'clip')} and {len(rates)} values of {RATE!r}.")
        return [{"array": clip, RATE: one} for clip, one in zip(clips, rates, strict=True)]
    several = isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and not _is_number(value)
    clips = list(value) if several else [value]
    if rate is None:
        return clips
    return [clip if isinstance(clip, Mapping) else {_key(clip): clip, RATE: rate} for clip in clips]


def _is_blank(value: Any) -> bool:
    return value == "" if isinstance(value, str) else isinstance(value, float) and math.isnan(value)


def _listed(value: Any, column: str) -> Any:
    """The numbers of a column; csv files hold them as text."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if isinstance(found, list):
        return found
    raise DataError(
        f"{column!r} must be a list of numbers, found {sort_of(value)}: {value[:40]!r}. For files use the "
        "column audio_path."
    )


def _key(clip: Any) -> str:
    return "path" if isinstance(clip, str) else "bytes" if isinstance(clip, bytes) else "array"


def _is_list_of_arrays(value: Any) -> bool:
    """Several clips of different lengths; lists of equal length are the channels of one."""
    if not isinstance(value, Sequence) or not value or not all(isinstance(v, (list, np.ndarray)) for v in value):
        return False
    return len({len(v) for v in value}) > 1


def _is_number(value: Sequence[Any]) -> bool:
    return bool(value) and isinstance(value[0], (int, float))


def read_given(clips: Sequence[Any]) -> list[Given]:
    """Every clip as it can be read."""
    many = len(clips) > 1
    return [given(clip, f"clip {number}" if many else "the clip") for number, clip in enumerate(clips, start=1)]


def as_pair(record: Record) -> Record:
    """`prompt` and `response` as a pair that all families know."""
    if record.get("response") is None or record.get("prompt") is None or record.get("completion") is not None:
        return record
    return {**{k: v for k, v in record.items() if k != "response"}, "completion": record["response"]}


__all__ = ["COLUMNS", "MEDIUM", "NUMBERED", "RATE", "as_pair", "audio_columns", "column_clips", "read_given"]
