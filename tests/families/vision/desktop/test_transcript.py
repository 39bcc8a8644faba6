"""Events in words. What a whole sample looks like is in unit/test_sample_shown.py."""

from __future__ import annotations

import pytest

from fullshard.families.vision.desktop.events import Event, Info, Key, Mouse, RawMouse, Screen
from fullshard.families.vision.desktop.formats import FORMATS
from fullshard.families.vision.desktop.transcript import passages, words
from tests.families.vision.desktop.samples import Pieces, pieces


def test_what_is_no_event_is_said() -> None:
    """Tokens that were made elsewhere may hold anything."""
    whole = pieces("<EVENT_START><KEYBOARD><9><9><9><VK_65><press><EVENT_END>")
    tokens = ["x", "<EPISODE_START>", *whole, "y", "<EVENT_START>", "<KEYBOARD>", "<EVENT_END>", "<EPISODE_END>"]
    tokenizer = Pieces()
    ids = [tokenizer.convert_tokens_to_ids(token) for token in [*tokens, *whole[:-1]]]
    assert list(passages(ids, tokenizer, FORMATS["factorized"], [])) == [
        ("not an event of this format", 1),
        ("start of the episode", 1),
        ("0.000 s  press A", 8),
        ("not an event of this format", 1),
        ("not an event of this format", 3),
        ("end of the episode", 1),
        ("not an event of this format", 7),
    ]


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (Screen(0, "a.png"), "screen"),
        (Key(0, 162, False), "release left Ctrl"),
        (Key(0, 255, True), "press key 255"),
        (RawMouse(0, 0, 0), "mouse: nothing"),
        (
            RawMouse(0, -4, 0, 0x30A),
            "mouse: move 4 left; left button up; right button up; x2 button down; x2 button up",
        ),
        (RawMouse(0, 0, 2, 0x400, -120), "mouse: move 2 down; wheel -1 notches"),
        (RawMouse(0, 0, 0, 0x800, 60), "mouse: side wheel +0.5 notches"),
        (Mouse(0, "move", 3, -4), "pointer: move to (3, -4)"),
        (Mouse(0, "click", 3, 4, "middle", True), "pointer: middle button down at (3, 4)"),
        (Mouse(0, "scroll", 3, 4, dy=-1), "pointer: scroll by (0, -1) at (3, 4)"),
        (Info(0, "WindowInfo", {"title": "x"}), "WindowInfo: {'title': 'x'}"),
    ],
)
def test_words(event: Event, said: str) -> None:
    assert words(event) == said
