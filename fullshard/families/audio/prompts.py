"""Prompts with clips, laid out as in training. Must not know commands, models or ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullshard.errors import SetupError
from fullshard.families.audio.bad_clips import read_clips
from fullshard.families.audio.encoders.audio_chat import AudioChat
from fullshard.families.audio.encoders.transcripts import PREFIX, START
from fullshard.families.audio.processor import AudioProcessor
from fullshard.families.audio.reading import Clip, read_again
from fullshard.families.audio.record_audio import MEDIUM
from fullshard.formatting.plural import counted
from fullshard.multimodal.prompts import Row, rendered, with_placeholders
from fullshard.multimodal.spans import replaced

Message = dict[str, Any]


def audio_prompt(text: str | None, messages: list[Message] | None, names: Sequence[str], processor: Any) -> Row | None:
    """The tokens of a prompt and the features of its clips, as in training."""
    if messages is None:
        laid_out, values = with_placeholders(str(text), names, processor.placeholder, MEDIUM), list(names)
    else:
        messages, values = AudioChat().with_clips({"messages": messages, "audio_path": list(names) or None})
        laid_out = rendered(messages, processor.tokenizer) if values else ""
    return _row(laid_out, values, processor) if values else None


def speech_prompt(
    text: str | None, messages: list[Message] | None, names: Sequence[str], processor: Any, *, source: Path | None
) -> Row:
    """The first tokens of a decoder and the features of the clip. A text is the beginning of the transcript, or all
    tokens that come before it."""
    if messages is not None:
        raise SetupError(
            "--messages: a speech encoder-decoder writes down a clip and has no conversations. Leave it out."
        )
    if len(names) != 1:
        raise SetupError(
            f"a speech encoder-decoder writes down one clip at a time: give --audio FILE once, not "
            f"{counted(len(names), 'time')}."
        )
    begins = "" if str(text).startswith(START) else _begins(processor.tokenizer, source)
    tokens = processor.tokenizer(begins + str(text or ""), add_special_tokens=False)["input_ids"]
    clips = read_clips(names, processor, root=None, max_seconds=None, of_record=False)
    return Row(list(tokens), _features(clips, processor))


def _begins(tokenizer: Any, source: Path | None) -> str:
    """What every input of the decoder begins with: as in training, or as stored beside the weights."""
    if (prefix := tokenizer.init_kwargs.get(PREFIX)) is not None:
        return str(prefix)
    file = source / "generation_config.json" if source is not None else None
    stored: dict[str, Any] = json.loads(file.read_text()) if file is not None and file.is_file() else {}
    if stored.get("is_multilingual") is False:
        return f"{START}<|notimestamps|>"
    language = str(stored.get("language") or "").strip("<|>")
    if f"<|{language}|>" in tokenizer.get_vocab():
        return f"{START}<|{language}|><|{stored.get('task') or 'transcribe'}|><|notimestamps|>"
    raise SetupError(
        "the model does not say in which language to write. Say it with the first tokens, for example: --prompt "
        f"'{START}<|en|><|transcribe|><|notimestamps|>'."
    )


def _row(text: str, values: Sequence[Any], processor: AudioProcessor) -> Row:
    clips = read_clips(values, processor, root=None, max_seconds=None, of_record=False)
    texts = [processor.clip_text(clip.samples) for clip in clips]
    whole = replaced(text, processor.placeholder, texts, [])[0]
    tokens = processor.tokenizer(whole, add_special_tokens=False)["input_ids"]
    return Row(list(tokens), _features(clips, processor))


def _features(clips: Sequence[Clip], processor: AudioProcessor) -> dict[str, Any]:
    samples = [read_again(clip.data, is_file=clip.is_file, root=None, rate=processor.rate) for clip in clips]
    return processor.features(samples)


__all__ = ["audio_prompt", "speech_prompt"]
