"""Events in words. What a whole sample looks like is in unit/test_sample_shown.py."""

from __future__ import annotations

import pytest

from fullshard.families.vision.desktop.events import Event, Info, Key, Mouse, RawMouse, Screen
from fullshard.families.vision.desktop.formats import FORMATS
from fullshard.families.vision.desktop.transcript import passages, words


class Letters:
    """A tokenizer of event tokens and letters."""

    known = (
        "<EPISODE_START>",
        "<EPISODE_END>",
        "<EVENT_START>",
        "<EVENT_END>",
        "<KEYBOARD>",
        "<9>",
        "<VK_65>",
        "<press>",
    )

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.known.index(token)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.known[one] if one < len(self.known) else chr(one) for one in ids)


def test_what_is_no_event_is_said() -> None:
    """Tokens that were made elsewhere may hold anything."""
    whole = [2, 4, 5, 5, 5, 6, 7, 3]
    ids = [ord("x"), 0, *whole, ord("y"), 2, 4, 3, 1, *whole[:-1]]
    assert list(passages(ids, Letters(), FORMATS["factorized"], [])) == [
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
