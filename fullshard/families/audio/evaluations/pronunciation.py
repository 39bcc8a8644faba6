"""Pronunciation scores in generated answers: correlations with the expected scores, and errors of the transcripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fullshard.contracts.objective import Numbers, Objective
from fullshard.errors import DataError
from fullshard.families.audio.generated_answers import GeneratedAnswers
from fullshard.families.audio.pronunciation import PHONEMES, SCORES, WORDS, measure, read_rating

if TYPE_CHECKING:
    from torch import nn


class Pronunciation(GeneratedAnswers):
    """`pearson_total` and so on: correlations of each score; `transcript_wer` and `transcript_per`: wrong words and
    phonemes; `unparsed`: answers without readable JSON, whose transcripts count as empty."""

    numbers: ClassVar[Numbers | None] = {
        **{f"pearson_{name}": "max" for name in SCORES},
        "transcript_wer": "min",
        "transcript_per": "min",
        "unparsed": "min",
    }

    def check(self, objective: Objective, model: nn.Module, held_out: Any) -> None:
        super().check(objective, model, held_out)
        if held_out is None:
            return
        texts = held_out.encoder.texts(held_out.records[0])
        if not any(map(read_rating, texts)):
            raise _not_json(held_out.records.where(0), max(texts, key=len, default=""))

    def measured(self, expected: Sequence[str], found: Sequence[str]) -> dict[str, float]:
        known = [read_rating(text) for text in expected]
        ratings = [rating for rating in known if rating is not None]
        if len(ratings) < len(known):
            raise _not_json("validation data", expected[known.index(None)])
        return measure(ratings, [read_rating(text) for text in found])


def _not_json(where: str, text: str) -> DataError:
    keys = ", ".join((*SCORES, WORDS, PHONEMES))
    return DataError(
        f"{where}: evaluate.parts: pronunciation needs answers in JSON with {keys}; found {text[:60]!r}. Use "
        "data.encode: speechocean762, raise data.sequence_length if answers are cut, or leave pronunciation out."
    )


__all__ = ["Pronunciation"]
