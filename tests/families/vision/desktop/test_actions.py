"""What an action does, and what guessing would get."""

from __future__ import annotations

import pytest

from fullshard.families.vision.desktop.actions import (
    DIRECTIONS,
    Meaning,
    Score,
    accuracy,
    baseline,
    direction,
    meaning_of_text,
    meanings,
)
from fullshard.families.vision.desktop.events import Event, Info, Key, Mouse, RawMouse, Screen
from fullshard.families.vision.desktop.formats import FORMATS, FormatName
from tests.families.vision.desktop.samples import random_events


def test_directions_are_sectors_of_45_degrees() -> None:
    steps = [(1, 0), (1, 1), (0, 1), (-1, 1), (-1, 0), (-1, -1), (0, -1), (1, -1)]
    assert [direction(*step) for step in steps] == list(DIRECTIONS)
    assert direction(0, 0) == "still"
    # The border between right and down right is at 22.5 degrees.
    assert [direction(1000, dy) for dy in (414, 415, -414, -415)] == ["right", "down right", "right", "up right"]
    assert direction(-1000, 1) == direction(-1000, -1) == "left"


@pytest.mark.parametrize(
    ("event", "found"),
    [
        (Key(0, 65, True), Meaning("key", "A down")),
        (Key(0, 13, False), Meaning("key", "Enter up")),
        (RawMouse(0, 5, -5), Meaning("movement", "up right")),
        (RawMouse(0, 0, 0), Meaning("movement", "still")),
        (RawMouse(0, 5, 5, 0x2), Meaning("button", "left up")),
        (RawMouse(0, 0, 0, 0x3), Meaning("button", "left down, left up")),
        (RawMouse(0, 0, 0, 0x400, -120), Meaning("scroll", "down")),
        (RawMouse(0, 0, 0, 0x800, 120), Meaning("scroll", "right")),
        (Mouse(0, "click", 1, 1, "right", True), Meaning("button", "right down")),
        (Mouse(0, "scroll", 1, 1, dy=1), Meaning("scroll", "up")),
        (Mouse(0, "scroll", 1, 1, dx=-1), Meaning("scroll", "left")),
        (Mouse(0, "move", 1, 1), None),
        (Screen(0), None),
        (Info(0, "WindowInfo", {}), None),
    ],
)
def test_meanings(event: Event, found: Meaning | None) -> None:
    assert meanings([event]) == [found]


def test_a_pointer_moves_from_its_last_position() -> None:
    events: list[Event] = [Mouse(0, "move", 10, 10), Screen(1), Mouse(2, "click", 10, 10, "left", True)]
    events += [Mouse(3, "move", 10, 4), Mouse(4, "move", 10, 4)]
    assert [one and one.value for one in meanings(events)] == [None, None, "left down", "up", "still"]


@pytest.mark.parametrize("name", FORMATS)
def test_the_meaning_of_a_text_is_that_of_its_event(name: FormatName) -> None:
    form = FORMATS[name]
    for event in random_events(500, seed=6):
        (*_, last) = form.rounded(event)
        if len(form.rounded(event)) == 1:
            assert meaning_of_text(form.encode(event), form) == meanings([last])[0]
    place = Mouse(0, "move", 0, 0)
    assert meaning_of_text(form.encode(Mouse(0, "move", 9, 0)), form, last=place) == Meaning("movement", "right")
    for text in ("", "<EVENT_START>", "what a model may write", "<EVENT_START><KEYBOARD><EVENT_END>"):
        assert meaning_of_text(text, form) is None


A, B = Meaning("key", "A down"), Meaning("key", "B down")
UP, LEFT = Meaning("movement", "up"), Meaning("movement", "left")


def test_accuracy_by_type() -> None:
    expected = [A, A, B, None, UP, LEFT]
    predicted = [A, B, UP, A, UP, None]
    assert accuracy(expected, predicted) == {"key": Score(1, 3), "movement": Score(1, 2), "all": Score(2, 5)}
    assert accuracy([None], [A]) == {}


def test_the_baseline_is_the_most_frequent_answer_seen() -> None:
    seen = [A, B, B, UP, UP, UP, LEFT, None]
    expected = [A, A, B, UP, LEFT, LEFT, Meaning("scroll", "up"), None]
    found = baseline(expected, seen)
    assert found == {"key": Score(1, 3), "movement": Score(1, 3), "scroll": Score(0, 1), "all": Score(1, 7)}
    assert found["key"].share == pytest.approx(1 / 3)
    assert baseline([None], seen) == {}
    assert baseline(expected, [])["all"] == Score(0, 7)
