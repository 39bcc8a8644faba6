"""Prompts with clips, laid out as in training. Must not know commands, models or ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fullshard.errors import SetupError
from fullshard.families.audio.bad_clips import read_clips
from fullshard.families.audio.encoders.audio_chat import AudioChat
from fullshard.families.audio.processor import AudioProcessor
from fullshard.families.audio.reading import read_again
from fullshard.families.audio.record_audio import MEDIUM
from fullshard.multimodal.prompts import Row, rendered, with_placeholders
from fullshard.multimodal.spans import replaced

Message = dict[str, Any]


def audio_prompt(text: str | None, messages: list[Message] | None, names: Sequence[str], processor: Any) -> Row | None:
    """The tokens of a prompt and the features of its clips, as in training."""
    if not processor.clip_tokens:
        raise SetupError("fullshard generate does not run speech encoder-decoders. Use Transformers' generate.")
    if messages is None:
        laid_out, values = with_placeholders(str(text), names, processor.placeholder, MEDIUM), list(names)
    else:
        messages, values = AudioChat().with_clips({"messages": messages, "audio_path": list(names) or None})
        laid_out = rendered(messages, processor.tokenizer) if values else ""
    return _row(laid_out, values, processor) if values else None


def _row(text: str, values: Sequence[Any], processor: AudioProcessor) -> Row:
    clips = read_clips(values, processor, root=None, max_seconds=None)
    texts = [processor.clip_text(clip.samples) for clip in clips]
    whole = replaced(text, processor.placeholder, texts, [])[0]
    tokens = processor.tokenizer(whole, add_special_tokens=False)["input_ids"]
    samples = [read_again(clip.data, is_file=clip.is_file, root=None, rate=processor.rate) for clip in clips]
    return Row(list(tokens), processor.features(samples))


__all__ = ["audio_prompt"]
