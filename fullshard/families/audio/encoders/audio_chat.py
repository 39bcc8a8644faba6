"""Conversations with audio; only the answers are learned, never a clip's own tokens.

Clips are in parts of the messages or in a column; they are read to the end when the data is encoded. Must not know
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from fullshard.contracts.data import Encoded, Features, Quantity, Record, Store
from fullshard.errors import DataError
from fullshard.families.audio import record_audio
from fullshard.families.audio.audio_samples import AudioCollator, audio_quantities, audio_sample, clip_passages
from fullshard.families.audio.bad_clips import ClipRules, kept_or_dropped, read_clips
from fullshard.families.audio.reading import Clip
from fullshard.multimodal.media_chat import OpenMediaChat
from fullshard.multimodal.parts import Medium
from fullshard.text.chat import FORMS, ChatEncoder
from fullshard.text.conversation import LISTS, Message
from fullshard.text.rendering import Layout, Rendered

WRITTEN = ("text_input", "prompt_only")
"""The columns of a conversation that is laid out already: all of its text, and the part before the answer."""


class AudioChat(ClipRules, ChatEncoder):
    """Conversations and question-answer pairs with audio."""

    forms: ClassVar[str] = FORMS.replace(
        "chat:",
        "audio_chat, with parts of type audio or a column audio_path, audio_array (and sampling_rate) or audio; also "
        "prompt/response or text_input/prompt_only:",
        1,
    )
    packs_media: ClassVar[bool] = True

    @staticmethod
    def accepts(record: Record) -> bool:
        in_parts = [value for key in LISTS for value in record_audio.MEDIUM.in_parts(record.get(key))]
        talks = ChatEncoder.accepts(record_audio.as_pair(record)) or all(record.get(key) for key in WRITTEN)
        return talks and bool(in_parts or record_audio.audio_columns(record))

    def quantities(self, store: Store) -> list[Quantity]:
        return [*super().quantities(store), *audio_quantities(store)]

    def open(self, processor: Any, *, length: int) -> OpenAudioChat:
        return OpenAudioChat(self, processor, length=length)

    def prepared(self, record: Record) -> Record:
        """The record in the columns that are read here; for encoders of data sets with others."""
        return record_audio.as_pair(record)

    def known_forms(self, record: Record) -> str:
        said = super().known_forms(record)
        if all(record.get(name) is not None for name in ("text", "accuracy", "total", "words")):
            return f"{said} For records of speechocean762 set data.encode: speechocean762."
        if any(isinstance(record.get(name), str) for name in ("text", "sentence", "transcription", "transcript")):
            return (
                f"{said} A transcript has no question: add a column prompt and call the transcript response, or train "
                "a speech encoder-decoder with data.encode: transcripts."
            )
        return said

    def conversation(self, record: Record) -> list[Message]:
        return self.with_clips(self.prepared(record))[0]

    def with_clips(self, record: Record) -> tuple[list[Message], list[Any]]:
        """The messages of a prepared record, with an audio part for each clip, and the clips in order."""
        plain = {key: record_audio.MEDIUM.text_only(record[key]) for key in LISTS if record.get(key) is not None}
        messages = [_with_marks(message) for message in super().conversation({**record, **plain})]
        in_parts = [value for key in plain for value in record_audio.MEDIUM.in_parts(record[key])]
        return messages, record_audio.MEDIUM.place(messages, in_parts, record_audio.column_clips(record))

    def texts(self, record: Record) -> list[str]:
        record = self.prepared(record)
        if _is_written(record):
            return [_marked(str(record[WRITTEN[0]])).replace(record_audio.MEDIUM.mark, "")]
        contents = [message.get("content") for message in self.with_clips(record)[0]]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        return [c for c in contents if isinstance(c, str)] + [part["text"] for part in parts if "text" in part]

    def variables(self, record: Record) -> dict[str, Any]:
        own = (*record_audio.COLUMNS, record_audio.RATE)
        return {k: v for k, v in super().variables(self.prepared(record)).items() if k not in own}


def _is_written(record: Record) -> bool:
    return all(record.get(key) is not None for key in WRITTEN)


def _marked(text: str) -> str:
    return record_audio.NUMBERED.sub(record_audio.MEDIUM.mark, text)


def _with_marks(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": _marked(content)} if isinstance(content, str) else dict(message)


class OpenAudioChat(OpenMediaChat):
    """Conversations with audio as samples."""

    settings: AudioChat
    medium: ClassVar[Medium] = record_audio.MEDIUM

    def __init__(self, settings: AudioChat, processor: Any, *, length: int) -> None:
        super().__init__(settings, processor, length=length)
        if not getattr(processor, "clip_tokens", False):
            raise DataError(
                f"data.encode.kind = {settings.kind()} needs a model that reads audio among its tokens: set model.kind "
                "= audio_lm. For a speech encoder-decoder set data.encode: transcripts."
            )

    def collator(self, store: Store) -> AudioCollator:
        return AudioCollator(self.settings, self.processor, root=self.settings.audio_root)

    def passages(self, sample: Features) -> list[tuple[str, int]]:
        return clip_passages(sample, self.processor, root=self.settings.audio_root)

    def _encode(self, record: Record) -> Encoded:
        record = self.settings.prepared(record)
        return kept_or_dropped(lambda: self._encoded(record), self.settings)

    def _encoded(self, record: Record) -> Encoded:
        if _is_written(record):
            values = record_audio.column_clips(record)
            rendered = Rendered([self._written(record, len(values))])
        else:
            messages, values = self.settings.with_clips(record)
            rendered = self._rendered(messages, record)
        most = self.settings.max_seconds
        clips = read_clips(values, self.processor, root=self.settings.audio_root, max_seconds=most)
        return self._sampled(rendered, clips)

    def _written(self, record: Record, clips: int) -> Layout:
        """The layout of a conversation that is a text already."""
        text, prompt = (str(record[key]) for key in WRITTEN)
        if not text.startswith(prompt):
            raise DataError(
                "'text_input' must start with 'prompt_only': the answer is what comes after it. Found "
                f"{text[:40]!r} and {prompt[:40]!r}."
            )
        mark, placeholder = self.medium.mark, self.processor.placeholder
        text, prompt = (_marked(each).replace(mark, placeholder) for each in (text, prompt))
        self.medium.check_places(text.count(placeholder), range(clips))
        return Layout(text, [(len(prompt), len(text))] if len(text) > len(prompt) else [], marked=False)

    def _texts_of(self, media: Sequence[Clip]) -> list[str]:
        return [str(self.processor.clip_text(clip.samples)) for clip in media]

    def _sample(self, tokens: Features, media: Sequence[Clip]) -> Features:
        return audio_sample(tokens, media, self.processor, length=self.length)


__all__ = ["AudioChat"]
