"""Records of the data set speechocean762: a clip is rated, and its words and phonemes are written down, as JSON.

The clip and its text, its scores and the phones of its words become a prompt and an answer. Must not know ranks.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fullshard.config.problems import found
from fullshard.contracts.data import Record
from fullshard.data.records import keys_found
from fullshard.errors import DataError
from fullshard.families.audio import record_audio
from fullshard.families.audio.encoders.audio_chat import AudioChat
from fullshard.families.audio.pronunciation import PHONEMES, SCORES, WORDS

COLUMNS = ("text", *SCORES, "words")
"""What a record has besides its clip."""
HIGHEST = 10
PROMPT = (
    "Rate the pronunciation in the audio. Answer in JSON with the scores accuracy, prosodic, fluency and total from 0 "
    "to 10, the word transcript and the phoneme transcript."
)


class Speechocean762(AudioChat):
    """Pronunciation scores and transcripts of speechocean762."""

    forms: ClassVar[str] = "speechocean762: audio, text, accuracy, fluency, prosodic, total, words (each with phones)"

    prompt: str = PROMPT
    """The question of every record."""

    @staticmethod
    def accepts(record: Record) -> bool:
        return not _missing(record)

    def prepared(self, record: Record) -> Record:
        if "completion" in record and not any(name in record for name in COLUMNS):
            return record  # prepared already
        if missing := _missing(record):
            raise DataError(
                f"the record has no {' and no '.join(map(repr, missing))}. {keys_found(record)} Records of "
                f"speechocean762 have audio, {', '.join(COLUMNS)}; for others use data.encode: audio_chat."
            )
        clip = {key: record[key] for key in (*record_audio.COLUMNS, record_audio.RATE) if record.get(key) is not None}
        return {**clip, "prompt": self.prompt, "completion": answer(record)}


def answer(record: Record) -> str:
    """The JSON that the model learns to give for a record."""
    if not isinstance(record["text"], str) or not record["text"].strip():
        raise DataError(f"'text' must be the words of the clip, found {found(record['text'])}.")
    scores = {name: _score(record[name], name) for name in SCORES}
    return json.dumps({**scores, WORDS: record["text"].strip(), PHONEMES: _phones(record["words"])}, ensure_ascii=False)


def _missing(record: Record) -> list[str]:
    audio = [] if record_audio.audio_columns(record) else ["audio"]
    return audio + [name for name in COLUMNS if record.get(name) is None]


def _score(value: Any, name: str) -> int | float:
    if isinstance(value, str):
        value = _parsed(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 <= value <= HIGHEST:
        raise DataError(f"{name!r} must be a score from 0 to {HIGHEST}, found {found(value)}.")
    return int(value) if value == int(value) else float(value)


def _phones(words: Any) -> str:
    """The phones of all words, separated by spaces."""
    if isinstance(words, str):
        words = _parsed(words)
    every = None
    if isinstance(words, Mapping):
        # A list for each column instead of a mapping for each word, as older versions of `datasets` store it.
        every = words.get("phones")
    elif isinstance(words, Sequence) and not isinstance(words, str):
        every = [word.get("phones") if isinstance(word, Mapping) else None for word in words]
    if not isinstance(every, Sequence) or not every:
        raise DataError(f"'words' must be a list of words, each with its phones; found {found(words)}.")
    return " ".join(phone for number, each in enumerate(every, start=1) for phone in _of_word(each, number))


def _parsed(text: str) -> Any:
    """A value that a csv file holds as text; the text itself if it is not a Python literal."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _of_word(phones: Any, number: int) -> list[str]:
    if isinstance(phones, str):
        phones = phones.split()
    if not isinstance(phones, Sequence) or not phones or not all(isinstance(phone, str) for phone in phones):
        raise DataError(
            f"word {number}: 'phones' must be a list of phones such as ['K', 'AE1', 'T'], found {found(phones)}."
        )
    return list(phones)


__all__ = ["Speechocean762"]
