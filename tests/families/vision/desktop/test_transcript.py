"""What a person reads of a window."""

from __future__ import annotations

import pytest

from fullshard.families.vision.desktop.episodes import Episode
from fullshard.families.vision.desktop.events import Event, Info, Key, Mouse, RawMouse, Screen
from fullshard.families.vision.desktop.formats import FORMATS
from fullshard.families.vision.desktop.transcript import pieces, transcript, words
from fullshard.families.vision.desktop.windows import cut

EXPECTED = """\
day 1/a.mcap: 4 events, 1 screen, 51 tokens, 35 trained on (T)

            start of the episode
            <EPISODE_START>

   0.000 s  screen: clip.mkv at 1.500 s
            <EVENT_START> <SCREEN> <1> <0> <0> [8 image tokens] <EVENT_END>

   0.050 s  press A
            <EVENT_START> <KEYBOARD> <1> <0> <5> <VK_65> <press> <EVENT_END>
            T             T          T   T   T   T       T       T

   0.050 s  press A
            <EVENT_START> <KEYBOARD> <1> <0> <5> <VK_65> <press> <EVENT_END>
            T             T          T   T   T   T       T       T

   0.200 s  mouse: move 5 right, 3 up; left button down
            <EVENT_START> <MOUSE> <1> <2> <0> <SIGN_PLUS> <0> <0> <0> <5> <SIGN_MINUS> <0> <0> <0> <3> <MB_0> <MB_0>
            T             T       T   T   T   T           T   T   T   T   T            T   T   T   T   T      T
            <MB_1> <EVENT_END>
            T      T

            end of the episode
            <EPISODE_END>"""


def test_a_transcript() -> None:
    events: list[Event] = [
        Screen(1_000_000_000, ("clip.mkv", 1_500_000_000)),
        Key(1_050_000_000, 65, True),
        Key(1_050_000_000, 65, True),
        RawMouse(1_200_000_000, 5, -3, 1),
    ]
    found = cut(
        Episode("day 1/a.mcap", events),
        FORMATS["factorized"],
        length=100,
        count_tokens=lambda text: len(pieces(text)),
        image_tokens=lambda ref: 8,
    )
    assert transcript(found.windows[0]) == EXPECTED


def test_a_tokenizer_cuts_the_text_its_own_way() -> None:
    events: list[Event] = [Screen(0, b"x"), Info(0, "WindowInfo", {"title": "a\nb"}), Key(0, 13, False)]
    settings = {"count_tokens": len, "image_tokens": lambda ref: 1}
    found = cut(Episode("a", events), FORMATS["json"], length=1000, use_info=True, **settings)
    text = transcript(found.windows[0], split=lambda text: [text[at : at + 9] for at in range(0, len(text), 9)])
    assert text.startswith("a: 3 events, 1 screen, ")
    assert "release Enter" in text
    assert "screen: an image of 1 byte" in text
    trained = next(one.text for one in found.windows[0].segments if one.event == events[2])
    assert f" {-(-len(trained) // 9)} trained on (T)" in text


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (Screen(0), "screen: not known"),
        (Screen(0, "a.png"), "screen: a.png"),
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
