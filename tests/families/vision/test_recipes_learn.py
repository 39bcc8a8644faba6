"""The recipes as shipped, on held-out data: what they learn is far above what guessing without the images gets."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import fullshard
from fullshard.contracts.data import Source

pytestmark = pytest.mark.timeout(1800)  # two minutes each on two free cores

MARGINS = {"actions": 0.5, "actions_key": 0.5, "actions_button": 0.3, "actions_movement": 0.3}
"""How far above its frequency baseline each share of predicted actions must be."""


@pytest.mark.slow
def test_desktop_predicts_actions_of_every_type(tmp_path: Path) -> None:
    found = fullshard.train(fullshard.read("desktop", f"output={tmp_path}")).validation
    for number, margin in MARGINS.items():
        assert found[number] >= found[f"{number}_baseline"] + margin, (number, found)


@pytest.mark.slow
def test_vision_answers_from_the_picture(tmp_path: Path) -> None:
    recipe = fullshard.read("vision", f"output={tmp_path}")
    assert recipe.data.validation is not None
    usual = usual_answers(recipe.data.train)
    held_out = list(questions(recipe.data.validation))
    baseline = sum(usual[question] == answer for question, answer in held_out) / len(held_out)
    assert 0.2 < baseline < 0.4
    assert fullshard.train(recipe).validation["answers"] >= baseline + 0.25


def questions(source: Source) -> Iterator[tuple[str, str]]:
    records = source.open()
    for index in range(len(records)):
        asked, answered = records[index]["messages"]
        yield asked["content"][-1]["text"], answered["content"]


def usual_answers(source: Source) -> dict[str, str]:
    """The most frequent answer to each question."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for question, answer in questions(source):
        counts[question][answer] += 1
    return {question: answers.most_common(1)[0][0] for question, answers in counts.items()}
