"""How many answers to clips the model gets right, token for token. Must not know FSDP or how the model was trained."""

from __future__ import annotations

from typing import ClassVar

from fullshard.multimodal.right_answers import RightAnswers


class AudioAnswers(RightAnswers):
    """`answers`: the share of answers of the validation data that are right from the first to the last token."""

    usual_objective: ClassVar[str] = "audio_lm"


__all__ = ["AudioAnswers"]
