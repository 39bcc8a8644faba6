"""Word and character error rates of texts, as jiwer computes them. Must not know models, tokens or ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fullshard.errors import missing_package


def jiwer() -> Any:
    """The package, or an error with the line that installs it."""
    try:
        import jiwer
    except ImportError as error:
        raise missing_package("jiwer", extra="audio", needed_by="counting wrong words") from error
    return jiwer


def word_error_rate(expected: Sequence[str], found: Sequence[str]) -> float:
    """Inserted, deleted and replaced words, relative to the expected words of all texts."""
    return float(jiwer().wer(list(expected), list(found)))


def character_error_rate(expected: Sequence[str], found: Sequence[str]) -> float:
    """The same for characters."""
    return float(jiwer().cer(list(expected), list(found)))


__all__ = ["character_error_rate", "jiwer", "word_error_rate"]
