"""Answers of the pronunciation task: JSON with scores and transcripts, and how close they are to the expected ones.

Must not know models, tokens or ranks.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.errors import missing_package
from fullshard.families.audio.error_rates import word_error_rate

SCORES = ("accuracy", "prosodic", "fluency", "total")
WORDS, PHONEMES = "word transcript", "phoneme transcript"


@dataclass(frozen=True)
class Rating:
    """An answer that could be read."""

    scores: dict[str, float]
    words: str
    phonemes: str


def read_rating(text: str) -> Rating | None:
    """The JSON object in an answer; None if it is damaged, or lacks a score or a transcript."""
    begin, end = text.find("{"), text.rfind("}")
    try:
        value: Any = json.loads(text[begin : end + 1])
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    scores: dict[str, Any] = {name: value.get(name) for name in SCORES}
    said = [value.get(name) for name in (WORDS, PHONEMES)]
    if not all(_is_number(score) for score in scores.values()) or not all(isinstance(text, str) for text in said):
        return None
    return Rating({name: float(score) for name, score in scores.items()}, *map(str, said))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def measure(expected: Sequence[Rating], found: Sequence[Rating | None]) -> dict[str, float]:
    """Pearson correlations of the scores over the answers that could be read, the error rates of the transcripts over
    all answers (one that could not be read has none), and the number of answers that could not be read."""
    pairs = [(true, given) for true, given in zip(expected, found, strict=True) if given is not None]
    numbers = {
        f"pearson_{name}": _pearson(
            [true.scores[name] for true, _ in pairs], [given.scores[name] for _, given in pairs]
        )
        for name in SCORES
    }
    words, phonemes = (
        word_error_rate([getattr(true, name) for true in expected], [getattr(given, name, "") for given in found])
        for name in ("words", "phonemes")
    )
    return {**numbers, "transcript_wer": words, "transcript_per": phonemes, "unparsed": float(len(found) - len(pairs))}


def _pearson(expected: list[float], found: list[float]) -> float:
    """NaN where it is not defined: with fewer than two answers, or if all are equal."""
    try:
        from scipy import stats
    except ImportError as error:
        raise missing_package("scipy", extra="audio", needed_by="evaluate.parts: pronunciation") from error
    if len(expected) < 2:
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        return float(stats.pearsonr(expected, found).statistic)


__all__ = ["PHONEMES", "SCORES", "WORDS", "Rating", "measure", "read_rating"]
