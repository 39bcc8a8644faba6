"""Episodes to windows: what is in them, what is left out, and what is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fullshard.errors import DataError
from fullshard.families.vision.desktop.episodes import Episode
from fullshard.families.vision.desktop.events import Event, ImageRef, Info, Key, Mouse, RawMouse, Screen
from fullshard.families.vision.desktop.formats import FORMATS, FormatName
from fullshard.families.vision.desktop.spans import learned
from fullshard.families.vision.desktop.windows import NO_IMAGE, ROUNDED, TOO_LONG, Cut, Image, Text, cut
from tests.families.vision.desktop.samples import Pieces, pieces, random_events

MS = 1_000_000
FORM = FORMATS["factorized"]
KEY_TOKENS, SCREEN_TOKENS = 8, 6


def count(text: str) -> int:
    return len(pieces(text))


def windows(events: Sequence[Event], length: int = 1000, image: int = 10, **settings: Any) -> Cut:
    form = settings.pop("form", FORM)
    return cut(
        Episode("a", list(events)), form, length=length, count_tokens=count, image_tokens=lambda _: image, **settings
    )


def said(segments: Sequence[Text | Image]) -> str:
    return "".join("[image]" if isinstance(one, Image) else one.text for one in segments)


def test_one_window_token_by_token() -> None:
    events = [Screen(0, "0.png"), Key(50 * MS, 65, True), Screen(100 * MS, b"png"), Key(150 * MS, 65, False)]
    (window,) = windows(events).windows
    assert window.segments == [
        Text("<EPISODE_START>", False, None),
        Text("<EVENT_START><SCREEN><0><0><0>", False, events[0]),
        Image("0.png", 10, events[0]),
        Text("<EVENT_END>", False, events[0]),
        Text("<EVENT_START><KEYBOARD><0><0><5><VK_65><press><EVENT_END>", True, events[1]),
        Text("<EVENT_START><SCREEN><0><1><0>", False, events[2]),
        Image(b"png", 10, events[2]),
        Text("<EVENT_END>", False, events[2]),
        Text("<EVENT_START><KEYBOARD><0><1><5><VK_65><release><EVENT_END>", True, events[3]),
        Text("<EPISODE_END>", False, None),
    ]
    assert window.tokens == 1 + 2 * (SCREEN_TOKENS + 10) + 2 * KEY_TOKENS + 1
    assert (window.images, window.learned, window.episode_path) == (["0.png", b"png"], True, "a")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("length", [40, 64, 200, 5000])
def test_windows_hold_the_whole_episode_in_order(name: FormatName, length: int) -> None:
    form = FORMATS[name]
    events = sorted(random_events(600, seed=4), key=lambda event: event.timestamp_ns)
    events = [one for one in events if not isinstance(one, Mouse)]
    found = windows(events, length, form=form, without_image="keep")
    texts = [said(window.segments) for window in found.windows]
    too_long = [one for one in events if count(form.encode(one)) + 10 * isinstance(one, Screen) > length]
    kept = [one for one in events if one not in too_long]
    assert found.events[TOO_LONG] == len(events) - len(kept)
    assert form.decode("".join(texts).replace("[image]", "")) == [part for one in kept for part in form.rounded(one)]
    for window in found.windows:
        assert window.tokens == sum(
            one.tokens if isinstance(one, Image) else count(one.text) for one in window.segments
        )
        assert window.tokens <= length
    # A window is closed only when the next event does not fit.
    for window, later in zip(found.windows, found.windows[1:], strict=False):
        first = [one for one in later.segments if one.event is later.segments[0].event]
        assert window.tokens + sum(one.tokens if isinstance(one, Image) else count(one.text) for one in first) > length


def test_an_event_that_is_too_long_is_skipped_and_counted() -> None:
    events = [Screen(0, b"png"), Key(0, 65, True), RawMouse(0, 5000, 0), Key(0, 65, False)]
    found = windows(events, length=SCREEN_TOKENS + 10 + 2 * KEY_TOKENS + 2)
    assert found.events == {TOO_LONG: 1}
    (window,) = found.windows
    assert [type(one.event) for one in window.segments if isinstance(one, Text) and one.trained] == [Key, Key]
    # A screen counts with its image.
    assert windows([Screen(0, b"png"), Key(0, 65, True)], length=15, without_image="keep").events == {TOO_LONG: 1}


def test_a_window_without_a_screen_is_skipped_or_kept() -> None:
    events = [Screen(0, b"png"), *(Key(time, 65, True) for time in range(10))]
    skipped, kept = (windows(events, length=24, without_image=choice) for choice in ("skip", "keep"))
    assert skipped.skipped == {NO_IMAGE: len(kept.windows) - len(skipped.windows)}
    assert len(skipped.windows) == 1
    assert [bool(window.images) for window in kept.windows] == [True, *[False] * 4]
    assert kept.skipped == {}


def test_the_start_and_the_end_of_an_episode_are_no_window() -> None:
    for length in (16, 17, 18):  # a screen with its image has 16 tokens
        (window,) = windows([Screen(0, b"png")], length=length, without_image="keep").windows
        assert window.tokens == length
        assert window.images
    assert not windows([], without_image="keep").windows


def test_the_shift_moves_actions_between_screens() -> None:
    events = [Screen(0, b"0"), Key(50 * MS, 65, True), Screen(100 * MS, b"1"), Key(150 * MS, 65, False)]
    orders = {}
    for shift in (0, 49, 50, -50, -51, 100):
        (window,) = windows(events, action_shift_ns=shift * MS).windows
        orders[shift] = [
            one.ref if isinstance(one, Image) else one.text[-18:-11] for one in window.segments if one.event
        ]
        times = [event.timestamp_ns for one in window.segments if (event := one.event)]
        assert times == sorted(times)
    press, release = "<press>", "elease>"
    for shift, order in orders.items():
        found = [one for one in order if one in (b"0", b"1", press, release)]
        expected = {
            0: [b"0", press, b"1", release],
            49: [b"0", press, b"1", release],
            50: [b"0", b"1", press, release],
            -50: [b"0", press, b"1", release],
            -51: [press, b"0", release, b"1"],
            100: [b"0", b"1", press, release],
        }
        assert found == expected[shift], shift


def test_the_shift_is_in_the_time_tokens() -> None:
    (window,) = windows([Screen(0, b"0"), Key(50 * MS, 65, True)], action_shift_ns=100 * MS).windows
    assert "<KEYBOARD><0><1><5>" in said(window.segments)


def test_pointer_events_are_used_only_without_raw_ones() -> None:
    both = [Screen(0, b"0"), Mouse(1, "move", 3, 4), RawMouse(2, 1, 1)]
    found = windows(both)
    assert found.events == {"MouseEvent messages that are left out: RawMouseEvent says the same": 1}
    assert "<POINTER>" not in said(found.windows[0].segments)
    found = windows(both[:2])
    assert not found.events
    assert "<POINTER>" in said(found.windows[0].segments)


def test_the_state_of_windows_is_never_trained_on() -> None:
    events = [Screen(0, b"0"), Info(1, "WindowInfo", {"title": "<EVENT_END>"}), Key(2, 65, True)]
    for form, use, written in (("factorized", True, False), ("json", False, False), ("json", True, True)):
        found = windows(events, form=FORMATS[form], use_info=use)
        assert found.events == ({} if written else {"WindowInfo messages that are left out": 1})
        trained = [one for one in found.windows[0].segments if isinstance(one, Text) and one.trained]
        assert [one.event for one in trained] == events[2:]
        assert ("WindowInfo" in said(found.windows[0].segments)) == written


def test_a_wheel_that_is_rounded_is_counted() -> None:
    events = [Screen(0, b"0"), *(RawMouse(1, 0, 0, 0x400, wheel) for wheel in (120, -240, 15, 3000))]
    assert windows(events).events == {ROUNDED: 1}
    assert windows(events, form=FORMATS["json"]).events == {}


def test_lengths_are_those_of_the_caller() -> None:
    seen: list[ImageRef] = []

    def image_tokens(ref: ImageRef) -> int:
        seen.append(ref)
        return 100

    events = [Screen(0, ("a.mkv", 5)), Key(1, 65, True)]
    found = cut(Episode("a", events), FORM, length=150, count_tokens=lambda text: 7, image_tokens=image_tokens)
    assert seen == [("a.mkv", 5)]
    assert [window.tokens for window in found.windows] == [7 + 7 + 100 + 7 + 7 + 7]


@pytest.mark.parametrize("name", FORMATS)
def test_the_mask_of_finished_windows_is_that_of_ours(name: FormatName) -> None:
    events = [one for one in random_events(300, seed=5) if not isinstance(one, Mouse)]
    for window in windows(events, 300, form=FORMATS[name]).windows:
        tokens, marks = list[str](), list[bool]()
        for one in window.segments:
            made = ["<image>"] * one.tokens if isinstance(one, Image) else pieces(one.text)
            tokens += made
            marks += [isinstance(one, Text) and one.trained] * len(made)
        pictures = [at for at, token in enumerate(tokens) if token == "<image>"]
        assert learned_in(tokens, name, pictures) == marks


def learned_in(tokens: list[str], name: FormatName, pictures: Sequence[int] = ()) -> list[bool]:
    tokenizer = Pieces()
    ids = [tokenizer.convert_tokens_to_ids(token) for token in tokens]
    return learned(ids, tokenizer, FORMATS[name], pictures=pictures).tolist()


def test_what_is_not_learned_of_finished_windows() -> None:
    state = ['{"message_type":"WindowInfo","timestamp_ns":1,"message":{"title":"KeyboardEvent"}}']
    assert learned_in(["<EVENT_START>", *state, "<EVENT_END>"], "json") == [False] * 3
    # An event that was cut off.
    assert learned_in(["<EVENT_END>", "<0>", "<EVENT_START>", "<KEYBOARD>"], "factorized") == [False] * 4
    with pytest.raises(DataError, match="Set data.encode.format to the format that the rows were made with"):
        learned_in(["<EVENT_START>", *state, "<EVENT_END>"], "factorized")
