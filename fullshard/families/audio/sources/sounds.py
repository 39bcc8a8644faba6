"""Generated clips with questions about pitch, direction, number of beeps and digits. Nothing is downloaded.

Every record follows from its number, so two ranges of numbers share no clip. Must not know tokens, batches or ranks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import Field

from fullshard.contracts.data import Records, Source
from fullshard.data.records import combine
from fullshard.families.audio.spoken_digits import check_espeak, has_espeak, speak

logger = logging.getLogger(__name__)

RATE = 16000
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PITCHES = {"low": (200, 350), "middle": (600, 900), "high": (1600, 2400)}
"""The range of each pitch, in Hz."""
KEYS = {
    digit: (row, column)
    for digits, row in (("123", 697), ("456", 770), ("789", 852), ("*0#", 941))
    for digit, column in zip(digits, (1209, 1336, 1477), strict=True)
}
"""The two frequencies of each key of a telephone (DTMF)."""


class Sounds(Source):
    """Clips (`audio_array`, `sampling_rate`) with one question (`prompt`) and its answer (`response`)."""

    records: int = Field(2000, ge=1)
    """How many."""
    start: int = Field(0, ge=0)
    """The number of the first: other ranges have other clips."""
    seconds: float = Field(0.6, ge=0.4, le=30)
    """The length of a clip."""
    digits: Literal["auto", "spoken", "dialled"] = "auto"
    """spoken: by espeak-ng; dialled: the tones of a telephone, the same on every machine; auto: spoken if espeak-ng is
    installed."""

    def open(self) -> Records:
        speaks = self.digits == "spoken" or (self.digits == "auto" and has_espeak())
        logger.info("digits are %s", "spoken by espeak-ng" if speaks else "dialled: tones of a telephone")
        return _Generated(self, check_espeak() if speaks else "")


@dataclass(frozen=True)
class _Generated:
    """The records, each made when it is read."""

    settings: Sounds
    voice: str
    """The version of espeak-ng; empty: digits are dialled."""

    def __len__(self) -> int:
        return self.settings.records

    def __getitem__(self, index: int) -> dict[str, Any]:
        return _record(
            range(self.settings.start, self.settings.start + len(self))[index], self.settings, spoken=bool(self.voice)
        )

    def where(self, index: int) -> str:
        return f"generated sounds, number {self.settings.start + index}"

    def fingerprint(self) -> str:
        return combine("sounds", "1", self.settings.model_dump_json(), self.voice)


def _record(number: int, settings: Sounds, *, spoken: bool) -> dict[str, Any]:
    draw = np.random.default_rng([number, 18])
    size = round(settings.seconds * RATE)
    makers = (_pitch, _direction, _beeps, _spoken_digit if spoken else _digit)
    question, answer, clip = makers[int(draw.integers(len(makers)))](size, draw)
    clip = clip * draw.uniform(0.2, 0.8) + 0.005 * draw.standard_normal(size)
    return {
        "prompt": question,
        "response": answer,
        "audio_array": clip.astype(np.float32),
        "sampling_rate": RATE,
    }


Made = tuple[str, str, np.ndarray]
"""A question, its answer, and the clip."""


def _pitch(size: int, draw: np.random.Generator) -> Made:
    answer = str(draw.choice(list(PITCHES)))
    return "Is the pitch low, middle or high?", answer, tone(np.full(size, draw.uniform(*PITCHES[answer])))


def _direction(size: int, draw: np.random.Generator) -> Made:
    low = draw.uniform(250, 600)
    rising = np.geomspace(low, low * draw.uniform(2.5, 4), size)
    answer = str(draw.choice(["rising", "falling"]))
    return "Is the pitch rising or falling?", answer, tone(rising if answer == "rising" else rising[::-1])


def _beeps(size: int, draw: np.random.Generator) -> Made:
    count, pitch = int(draw.integers(1, 5)), draw.uniform(500, 1500)
    slot = size // 4
    clip = np.zeros(size)
    # The beeps start together after a pause of any length.
    first = int(draw.integers(0, (4 - count) * slot + 1))
    for beep in range(count):
        begin = first + beep * slot
        clip[begin : begin + slot // 2] = tone(np.full(slot // 2, pitch))
    return "How many beeps are there?", NUMBERS[count], clip


def _digit(size: int, draw: np.random.Generator) -> Made:
    digit = int(draw.integers(10))
    row, column = (tone(np.full(size, float(pitch))) for pitch in KEYS[str(digit)])
    return "Which digit is it?", NUMBERS[digit], (row + column) / 2


def _spoken_digit(size: int, draw: np.random.Generator) -> Made:
    digit = int(draw.integers(10))
    said = speak(
        NUMBERS[digit], speed=140 + 20 * int(draw.integers(5)), pitch=30 + 10 * int(draw.integers(5)), rate=RATE
    )
    clip = np.zeros(size)
    clip[: len(said)] = said[:size]
    return "Which digit is it?", NUMBERS[digit], clip


def tone(pitch: np.ndarray) -> np.ndarray:
    """A tone with this pitch in Hz at each sample, faded in and out over 10 ms."""
    fade = min(RATE // 100, len(pitch) // 2)
    ramp = np.minimum(1, np.minimum(np.arange(len(pitch)), np.arange(len(pitch))[::-1]) / max(fade, 1))
    return np.asarray(np.sin(2 * np.pi * np.cumsum(pitch) / RATE) * ramp)


__all__ = ["Sounds"]
