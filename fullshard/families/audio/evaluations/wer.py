"""Word and character error rates of generated answers, by jiwer: for transcripts and other answers in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fullshard.contracts.objective import Numbers
from fullshard.families.audio.error_rates import character_error_rate, word_error_rate
from fullshard.families.audio.generated_answers import GeneratedAnswers


class WordErrorRate(GeneratedAnswers):
    """`wer` and `cer`: wrong words and characters of the answers, relative to the expected ones."""

    numbers: ClassVar[Numbers | None] = {"wer": "min", "cer": "min"}

    def measured(self, expected: Sequence[str], found: Sequence[str]) -> dict[str, float]:
        return {"wer": word_error_rate(expected, found), "cer": character_error_rate(expected, found)}


__all__ = ["WordErrorRate"]
