"""Next-token prediction for vision-language models. Must not know data sources, optimizers or FSDP."""

from __future__ import annotations

from typing import ClassVar

from fullshard.multimodal.objective import MediaNextToken


class VisionLM(MediaNextToken):
    """Cross-entropy of the next token, given tokens and images; `labels[i]` is the target of position i."""

    encoder: ClassVar[str | None] = "image_chat"


__all__ = ["VisionLM"]
