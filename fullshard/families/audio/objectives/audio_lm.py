"""Next-token prediction for audio language models. Must not know data sources, optimizers or FSDP."""

from __future__ import annotations

from typing import ClassVar

from fullshard.multimodal.objective import MediaNextToken


class AudioLM(MediaNextToken):
    """Cross-entropy of the next token, given tokens and audio; `labels[i]` is the target of position i."""

    encoder: ClassVar[str | None] = "audio_chat"


__all__ = ["AudioLM"]
