"""Clips with their transcripts, for speech encoder-decoders such as Whisper.

The decoder's tokens are the answer; those that say language and task come first and are not learned. Must not know
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from fullshard.config.problems import sort_of
from fullshard.contracts.data import Encoded, Features, OpenEncoder, Quantity, Record, Store, token_samples
from fullshard.data.records import keys_found
from fullshard.errors import DataError, RecipeError
from fullshard.families.audio.audio_samples import AudioCollator, audio_quantities, audio_sample, clip_passages
from fullshard.families.audio.bad_clips import ClipRules, kept_or_dropped, read_clips
from fullshard.families.audio.record_audio import audio_columns, column_clips
from fullshard.formatting.plural import counted
from fullshard.text.tokens import collate_tokens, sample, shifted

START = "<|startoftranscript|>"
PREFIX = "decoder_prefix"
"""The key of the tokenizer's settings that keeps what the decoder's input begins with."""
TEXTS = ("text", "sentence", "transcription", "transcript", "response")
"""Columns with a transcript that are understood without being named."""


class Transcripts(ClipRules):
    """Clips with their transcripts."""

    forms: ClassVar[str] = (
        'transcripts: {"audio_path": "...", "text": "..."}, with audio as in audio_chat and a text in '
        + ", ".join(TEXTS)
    )

    text: str | None = None
    """The column of the transcript; null: one of the known ones."""
    language: str | None = "en"
    """The language of the transcripts, by its code; null for models of one language."""
    task: Literal["transcribe", "translate"] = "transcribe"
    """The decoder's task, for models of several languages."""

    @staticmethod
    def accepts(record: Record) -> bool:
        return bool(audio_columns(record)) and sum(isinstance(record.get(key), str) for key in TEXTS[:-1]) == 1

    def texts(self, record: Record) -> list[str]:
        return [self.transcript(record)]

    def quantities(self, store: Store) -> list[Quantity]:
        return [*super().quantities(store), *audio_quantities(store)]

    def collate(self, samples: Sequence[Features], *, length: int | None) -> dict[str, Any]:
        return collate_tokens(samples, length=length)

    def open(self, processor: Any, *, length: int) -> OpenTranscripts:
        return OpenTranscripts(self, processor, length=length)

    def transcript(self, record: Record) -> str:
        """The text of a record."""
        columns = [self.text] if self.text else [key for key in TEXTS if record.get(key) is not None]
        if len(columns) != 1 or columns[0] not in record:
            raise DataError(
                f"no transcript found in the record. {keys_found(record)} Accepted: one of {', '.join(TEXTS)}. For "
                "another column set data.encode = {kind: transcripts, text: COLUMN}."
            )
        value = record[columns[0]]
        if isinstance(value, float) and math.isnan(value):
            value = None  # tables write NaN where a text is missing
        if not isinstance(value, str):
            raise DataError(f"{columns[0]!r} must be a string, found {sort_of(value)}.")
        return value


class OpenTranscripts(OpenEncoder):
    """Tokenizes transcripts after the tokens that every decoder input begins with."""

    settings: Transcripts

    def __init__(self, settings: Transcripts, processor: Any, *, length: int) -> None:
        super().__init__(settings, processor, length=length)
        if getattr(processor, "clip_tokens", True):
            raise DataError(
                "data.encode.kind = transcripts needs a speech encoder-decoder, such as Whisper. For an audio language "
                "model set data.encode: audio_chat."
            )
        self._tokenizer = processor.tokenizer
        self.prefix = self._prefix()

    def encode(self, record: Record) -> Encoded:
        return kept_or_dropped(lambda: self._encoded(record), self.settings)

    def collator(self, store: Store) -> SpeechCollator:
        return SpeechCollator(self.settings, self.processor, root=self.settings.audio_root)

    def passages(self, sample: Features) -> list[tuple[str, int]]:
        return clip_passages(sample, self.processor, root=self.settings.audio_root)

    def notes(self) -> list[str]:
        return [f"decoder input begins with {self._written_prefix()}, not learned"]

    def annotate_processor(self) -> None:
        self._tokenizer.init_kwargs[PREFIX] = self._written_prefix()

    def _written_prefix(self) -> str:
        return "".join(self._tokenizer.convert_ids_to_tokens(self.prefix))

    def _prefix(self) -> list[int]:
        said = self.settings.language
        names = ["startoftranscript", *([said, self.settings.task] if said else []), "notimestamps"]
        vocabulary = self._tokenizer.get_vocab()
        if missing := [f"<|{name}|>" for name in names if f"<|{name}|>" not in vocabulary]:
            fix = "Check data.encode.language (a code such as en); it is null for models of one language."
            raise RecipeError(f"data.encode: the tokenizer has no {' and no '.join(missing)}. {fix}")
        return [int(vocabulary[f"<|{name}|>"]) for name in names]

    def _encoded(self, record: Record) -> Encoded:
        values, text = column_clips(record), self.settings.transcript(record)
        if len(values) != 1:
            raise DataError(f"a transcript belongs to one clip, found {counted(len(values), 'clip')}.")
        most = self.settings.max_seconds
        clips = read_clips(values, self.processor, root=self.settings.audio_root, max_seconds=most)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"] if text.strip() else []
        whole = np.array([*self.prefix, *ids, self._tokenizer.eos_token_id], dtype=np.int32)
        learned = np.arange(len(whole)) >= (len(self.prefix) if ids else len(whole))
        tokens = sample(whole, shifted(whole, learned))
        cut = token_samples([tokens], length=self.length)
        kept = [audio_sample(tokens, clips, self.processor, length=self.length)] if cut.samples else []
        return Encoded(kept, cut.truncated, cut.dropped)


class SpeechCollator(AudioCollator):
    """Rows that all have one clip, so every rank runs the encoder in every micro-batch."""

    def blank(self, sample: Features) -> Features:
        return {name: np.full_like(a, -100) if name == "labels" else a for name, a in sample.items()}

    def touching(self, samples: Sequence[Features]) -> Sequence[Features]:
        return samples


__all__ = ["Transcripts"]
