"""Generated clips: each follows from its number, holds what its answer says, and can be read as audio."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fullshard.errors import SetupError
from fullshard.families.audio.sources.sounds import KEYS, NUMBERS, PITCHES, RATE, Sounds
from fullshard.families.audio.spoken_digits import speak

CLIPS = list(map(Sounds(records=400, digits="dialled").open().__getitem__, range(400)))


def asked(word: str) -> list[tuple[str, np.ndarray]]:
    """Answer and clip of the records whose question has this word."""
    return [(record["response"], record["audio_array"]) for record in CLIPS if word in record["prompt"]]


def loudest(clip: np.ndarray, count: int = 1) -> list[float]:
    """The strongest frequencies in Hz, at least 50 Hz apart."""
    strength = np.abs(np.fft.rfft(clip, n=RATE))
    found: list[float] = []
    for pitch in map(float, np.argsort(strength)[::-1]):
        if all(abs(pitch - other) > 50 for other in found):
            found.append(pitch)
        if len(found) == count:
            break
    return sorted(found)


def test_a_record_follows_from_its_number() -> None:
    again = Sounds(records=10, start=390, digits="dialled").open()
    for index in range(10):
        assert np.array_equal(again[index]["audio_array"], CLIPS[390 + index]["audio_array"])
        assert again[index]["prompt"] == CLIPS[390 + index]["prompt"]
    assert again.where(3) == "generated sounds, number 393"
    assert len({record["audio_array"].tobytes() for record in CLIPS}) == 400
    with pytest.raises(IndexError):
        again[10]


def test_the_fingerprint_follows_from_the_settings() -> None:
    settings = [Sounds(), Sounds(start=1), Sounds(records=3), Sounds(seconds=0.7)]
    assert len({each.open().fingerprint() for each in settings}) == 4
    assert Sounds().open().fingerprint() == Sounds().open().fingerprint()


def test_clips_are_float32_and_in_range() -> None:
    for record in CLIPS:
        assert (record["audio_array"].dtype, record["sampling_rate"]) == (np.float32, 16000)
        assert len(record["audio_array"]) == 9600
        assert 0.1 < np.abs(record["audio_array"]).max() <= 1


def test_the_answers_are_true() -> None:
    for answer, clip in asked("low"):
        low, high = PITCHES[answer]
        assert low - 5 <= loudest(clip)[0] <= high + 5
    for answer, clip in asked("rising"):
        begin, end = (loudest(part)[0] for part in (clip[:1600], clip[-1600:]))
        assert answer == ("rising" if begin < end else "falling")
    for answer, clip in asked("beeps"):
        # Level in windows of 10 ms.
        level = np.sqrt((clip[: len(clip) // 160 * 160].reshape(-1, 160) ** 2).mean(1)) > 0.05
        assert NUMBERS.index(answer) == int(level[0]) + int((np.diff(level.astype(int)) == 1).sum())
    for answer, clip in asked("digit"):
        np.testing.assert_allclose(loudest(clip, 2), KEYS[str(NUMBERS.index(answer))], atol=3)


def test_no_answer_is_frequent() -> None:
    """Always giving the most frequent answer to each question is right in less than 40 % of the cases."""
    questions = {record["prompt"] for record in CLIPS}
    right = sum(Counter(r["response"] for r in CLIPS if r["prompt"] == q).most_common(1)[0][1] for q in questions)
    assert len(questions) == 4
    assert right / len(CLIPS) < 0.4


def test_spoken_digits_need_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SetupError, match=r"needs the program espeak-ng.*apt-get install espeak-ng.*digits: dialled"):
        Sounds(digits="spoken").open()


VOICE = f"""#!{sys.executable}
import sys
import numpy, soundfile

if "--version" in sys.argv:
    print("eSpeak NG text-to-speech: 1.51, a stand-in")
else:
    words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    speed, pitch = int(words["-s"]), int(words["-p"])
    times = numpy.arange(22050 * 60 // speed) / 22050
    said = 0.5 * numpy.sin(2 * numpy.pi * 10 * (pitch + len(sys.argv[-1])) * times)
    soundfile.write(words["-w"], numpy.concatenate([numpy.zeros(2000), said, numpy.zeros(2000)]), 22050)
"""
"""A program that is called as espeak-ng is, and gives a tone for a word."""


@pytest.fixture
def voice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    program = tmp_path / "espeak-ng"
    program.write_text(VOICE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    speak.cache_clear()
    yield
    speak.cache_clear()


@pytest.mark.usefixtures("voice")
def test_digits_are_spoken_if_the_program_is_installed() -> None:
    records = Sounds(records=24, seconds=1).open()
    said = [record for record in map(records.__getitem__, range(24)) if "digit" in record["prompt"]]
    assert said
    for record in said:
        clip = record["audio_array"]
        assert len(clip) == RATE
        assert 0.1 < np.abs(clip).max() <= 1.1
        # At the model's rate, from the first sample on: one of five pitches, by the length of the word.
        assert min(abs(loudest(clip)[0] - 10 * (pitch + len(record["response"]))) for pitch in range(30, 80, 10)) <= 2
        assert np.abs(clip[:800]).max() > 0.1
    again = Sounds(records=24, seconds=1, digits="spoken").open()
    assert np.array_equal(again[0]["audio_array"], records[0]["audio_array"])
    dialled = Sounds(records=24, seconds=1, digits="dialled").open()
    assert dialled.fingerprint() != records.fingerprint() != again.fingerprint()


def test_digits_are_dialled_without_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    clips = Sounds(records=400).open()
    assert all(np.array_equal(clips[i]["audio_array"], CLIPS[i]["audio_array"]) for i in range(0, 400, 20))
