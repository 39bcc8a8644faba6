"""Events to text and back, exactly."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from fullshard.families.vision.desktop.events import Info, Key, Mouse, RawMouse, Screen
from fullshard.families.vision.desktop.formats import FORMATS, FormatName
from tests.families.vision.desktop.samples import pieces, random_events, random_infos

NAMES: tuple[FormatName, ...] = ("factorized", "hierarchical", "json")
REPEATS_NS = {"factorized": 10 * 10**9, "hierarchical": 16 * 10**9}


@pytest.mark.parametrize("name", NAMES)
def test_decoding_gives_the_rounded_event_back(name: FormatName) -> None:
    form = FORMATS[name]
    texts, expected = [], []
    for event in random_events(4000):
        text, rounded = form.encode(event), form.rounded(event)
        assert form.decode(text) == rounded
        assert [two for one in rounded for two in form.rounded(one)] == rounded  # rounding twice changes nothing
        texts.append(text)
        expected += rounded
    # And all of them in a row.
    assert form.decode("<EPISODE_START>" + "".join(texts) + "<EPISODE_END>") == expected


@pytest.mark.parametrize("name", ["factorized", "hierarchical"])
def test_what_rounding_loses(name: FormatName) -> None:
    """Time is known to 10 ms and repeats; the wheel turns in notches; all movement and all buttons stay."""
    form = FORMATS[name]
    for event in random_events(4000, seed=2):
        rounded: list[Any] = form.rounded(event)
        time = event.timestamp_ns // 10_000_000 * 10_000_000 % REPEATS_NS[name]
        assert {one.timestamp_ns for one in rounded} == {time}
        if not isinstance(event, RawMouse):
            assert rounded == [
                replace(event, timestamp_ns=time, **({"image": None} if isinstance(event, Screen) else {}))
            ]
            continue
        assert (sum(one.dx for one in rounded), sum(one.dy for one in rounded)) == (event.dx, event.dy)
        assert abs(sum(one.wheel for one in rounded) - event.wheel) <= 60
        assert rounded[-1].flags == event.flags
        assert all(one.flags & ~0xC00 == 0 for one in rounded[:-1])
        if max(abs(event.dx), abs(event.dy)) <= 1999 and event.wheel % 120 == 0 and abs(event.wheel) <= 9 * 120:
            assert rounded == [replace(event, timestamp_ns=time)]


def test_json_rounds_nothing() -> None:
    form = FORMATS["json"]
    for event in [*random_events(3000, seed=3), *random_infos(2000)]:
        (found,) = form.decode(form.encode(event))
        assert found == (replace(event, image=None) if isinstance(event, Screen) else event)


def test_titles_cannot_write_special_tokens() -> None:
    for event in random_infos(500):
        text = FORMATS["json"].encode(event)
        assert text.count("<") == 2, text


@pytest.mark.parametrize("name", ["factorized", "hierarchical"])
def test_every_token_is_in_the_vocabulary(name: FormatName) -> None:
    form, used = FORMATS[name], set[str]()
    for event in [*random_events(4000), *(Key(0, key, True) for key in range(256))]:
        tokens = pieces(form.encode(event))
        assert "".join(tokens) == form.encode(event)
        used.update(tokens)
    assert used | {"<EPISODE_START>", "<EPISODE_END>"} == set(form.vocabulary())


@pytest.mark.parametrize(("name", "size"), [("factorized", 303), ("hierarchical", 275), ("json", 4)])
def test_vocabularies_are_the_same_every_time(name: FormatName, size: int) -> None:
    vocabulary = FORMATS[name].vocabulary()
    assert len(vocabulary) == len(set(vocabulary)) == size
    assert vocabulary == FORMATS[name].vocabulary()
    assert all(re.fullmatch(r"<[A-Za-z0-9_]+>", token) for token in vocabulary)


TEXTS = {
    # As open-world-agents writes them.
    "factorized": [
        (Key(12_340_000_000, 65, True), "<KEYBOARD><2><3><4><VK_65><press>"),
        (
            RawMouse(3_509_999_999, -64, 1999, 0x404, -240),
            "<MOUSE><3><5><0><SIGN_MINUS><0><0><6><4><SIGN_PLUS><1><9><9><9><MB_4><MB_0><MB_4><SIGN_MINUS><2>",
        ),
        (RawMouse(0, 0, 0), f"<MOUSE><0><0><0>{'<SIGN_PLUS><0><0><0><0>' * 2}<MB_0><MB_0><MB_0>"),
        (Screen(10_000_000), "<SCREEN><0><0><1>"),
        # Ours: they have no tokens for the pointer.
        (
            Mouse(0, "click", -5, 1920, "left", False),
            "<POINTER><0><0><0><SIGN_MINUS><0><0><0><0><5><SIGN_PLUS><0><1><9><2><0><click><BUTTON_left><release>",
        ),
    ],
    "hierarchical": [
        (Key(12_340_000_000, 65, True), "<KEYBOARD><12><3><4><65><press>"),
        (RawMouse(0, -3, 64, 0x404, 120), "<MOUSE><0><0><0><1><0><19><0><9><6><7><4><4><0><4><0><1>"),
        (Screen(10_000_000), "<SCREEN><0><0><1>"),
        (Mouse(0, "move", -1, 1920), "<POINTER><0><0><0><1><0><99><1><99><92><9><0><move>"),
    ],
    "json": [
        (
            Key(5, 65, False),
            '{"message_type":"KeyboardEvent","timestamp_ns":5,"message":{"event_type":"release","vk":65}}',
        ),
        (Screen(5), '{"message_type":"ScreenCaptured","timestamp_ns":5}'),
        (
            Info(5, "WindowInfo", {"title": "ä <b>"}),
            '{"message_type":"WindowInfo","timestamp_ns":5,"message":{"title":"ä \\u003cb>"}}',
        ),
    ],
}


@pytest.mark.parametrize("name", NAMES)
def test_texts(name: FormatName) -> None:
    for event, text in TEXTS[name]:
        assert FORMATS[name].encode(event) == f"<EVENT_START>{text}<EVENT_END>"


def test_the_lowest_hierarchical_number_is_read() -> None:
    """Written elsewhere: ours are split at ±1,999."""
    found = FORMATS["hierarchical"].decode("<EVENT_START><MOUSE><0><0><0><1><0><0><0><0><0><0><0><0><0><0><EVENT_END>")
    assert found == [RawMouse(0, -2000, 0)]


@pytest.mark.parametrize("name", NAMES)
def test_a_screen_may_have_image_tokens(name: FormatName) -> None:
    form = FORMATS[name]
    text = form.encode(Screen(20_000_000, b"x")).replace("<EVENT_END>", "<global-img><image><image><EVENT_END>")
    assert form.decode(text) == [Screen(20_000_000)]


@pytest.mark.parametrize("name", NAMES)
def test_text_that_is_no_event_is_refused(name: FormatName) -> None:
    form = FORMATS[name]
    whole = form.encode(RawMouse(0, 5, -5, 1))
    inner = whole.removeprefix("<EVENT_START>").removesuffix("<EVENT_END>")
    other = "<KEYBOARD>" if name == "json" else "<9>"
    for text in (
        "hello",
        f"{whole}hello",
        whole.removesuffix("<EVENT_END>"),
        inner,
        "<EVENT_START><EVENT_END>",
        f"<EVENT_START>{inner}{other}{other}{other}<EVENT_END>",
        f"<EVENT_START>{inner[:-6]}<EVENT_END>",
        f"<EVENT_START>{inner.replace('5', '5x')}<EVENT_END>",
        "<EVENT_START>[1]<EVENT_END>",
        '<EVENT_START>{"message_type":"KeyboardEvent","timestamp_ns":1,"message":{"vk":300}}<EVENT_END>',
    ):
        with pytest.raises(ValueError, match="event"):
            form.decode(text)


def test_only_json_takes_the_state_of_windows() -> None:
    info = Info(0, "WindowInfo", {})
    assert [FORMATS[name].takes(info) for name in NAMES] == [False, False, True]
