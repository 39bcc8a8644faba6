"""Answers of the pronunciation task: which can be read, and numbers equal to those of scipy and jiwer."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import jiwer
import numpy as np
import pytest
from scipy import stats

from fullshard.errors import SetupError
from fullshard.families.audio.error_rates import character_error_rate, word_error_rate
from fullshard.families.audio.pronunciation import SCORES, Rating, measure, read_rating

WHOLE = {
    "accuracy": 8,
    "prosodic": 7.5,
    "fluency": 9,
    "total": 8,
    "word transcript": "WE CALL IT BEAR",
    "phoneme transcript": "W IY0 K AO0 L IH0 T B EH0 R",
}


def rating(number: int) -> Rating:
    draw = np.random.default_rng(number)
    words = list(draw.choice(["CALL", "BEAR", "TREE", "IS"], 4))
    scores = {name: float(draw.integers(0, 11)) for name in SCORES}
    return Rating(scores, " ".join(words), " ".join(" ".join(word) for word in words))


def test_an_answer_is_read() -> None:
    text = json.dumps(WHOLE)
    scores = {"accuracy": 8.0, "prosodic": 7.5, "fluency": 9.0, "total": 8.0}
    expected = Rating(scores, "WE CALL IT BEAR", "W IY0 K AO0 L IH0 T B EH0 R")
    for answer in (text, f" {text}\n", f"```json\n{text}\n```"):
        assert read_rating(answer) == expected


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "eight",
        json.dumps(WHOLE)[:-1],
        json.dumps([WHOLE])[1:-1].replace(":", ""),
        *(json.dumps({key: value for key, value in WHOLE.items() if key != name}) for name in WHOLE),
        *(json.dumps({**WHOLE, "total": bad}) for bad in ("8", True, None, math.nan, math.inf)),
        json.dumps({**WHOLE, "word transcript": ["WE"]}),
        "}{",
    ],
)
def test_a_damaged_answer_is_not_read(answer: str) -> None:
    assert read_rating(answer) is None


def test_the_numbers_are_those_of_scipy_and_jiwer() -> None:
    expected = [rating(n) for n in range(40)]
    found = [None if n in (7, 20) else rating(n + 1) if n % 3 else rating(n) for n in range(40)]
    numbers = measure(expected, found)
    read = [(true, given) for true, given in zip(expected, found, strict=True) if given is not None]
    for name in SCORES:
        columns = [[each.scores[name] for each in side] for side in zip(*read, strict=True)]
        assert numbers[f"pearson_{name}"] == pytest.approx(stats.pearsonr(*columns).statistic, rel=1e-12)
    words = [given.words if given else "" for given in found]
    phones = [given.phonemes if given else "" for given in found]
    assert numbers["transcript_wer"] == jiwer.wer([true.words for true in expected], words)
    assert numbers["transcript_per"] == jiwer.wer([true.phonemes for true in expected], phones)
    assert numbers["unparsed"] == 2
    assert 0 < numbers["pearson_total"] < 1 > numbers["transcript_per"] > 0


def test_nothing_to_correlate_is_nan_without_a_warning() -> None:
    same = [rating(1)] * 3
    for expected, found in (
        ([rating(1)], [rating(1)]),
        ([rating(1), rating(2)], [None, None]),
        ([rating(1), rating(2), rating(3)], same),
    ):
        assert math.isnan(measure(expected, found)["pearson_total"])


def test_error_rates_are_those_of_jiwer() -> None:
    expected, found = ["one two three", "four", "five six"], ["one too three", "", "five six seven"]
    assert word_error_rate(expected, found) == jiwer.wer(expected, found) == 0.5
    assert character_error_rate(expected, found) == jiwer.cer(expected, found)


@pytest.mark.parametrize("package", ["jiwer", "scipy"])
def test_a_missing_package_says_how_to_install_it(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    both: Any = [rating(1), rating(2)]
    with pytest.raises(SetupError, match=rf"{package}, which is not installed.*pip install 'fullshard\[audio\]'"):
        measure(both, both)
