"""Rows of desktop recordings: what is read, and what is refused with which message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fullshard.errors import DataError
from fullshard.families.vision.desktop.episodes import Episodes, read_episode
from fullshard.families.vision.desktop.events import Info, Key, Mouse, RawMouse, Screen
from fullshard.families.vision.desktop.rows import event, events_of, form_of, message_of, tokenised
from tests.families.vision.desktop.samples import (
    KEY,
    RAW,
    SCREEN,
    everything,
    listed,
    only_episode,
    random_events,
    row,
)

PNG = b"\x89PNG..."


def envelope(kind: str, message: Any, time: int | None = None) -> bytes:
    """A message as the recording library writes it."""
    found: dict[str, Any] = {"topic": "any", "message_type": f"desktop/{kind}", "message": json.dumps(message)}
    return json.dumps(found if time is None else found | {"timestamp": time}).encode()


@pytest.mark.parametrize(
    ("kind", "message", "found"),
    [
        ("KeyboardEvent", KEY, Key(7, 65, True)),
        ("KeyboardEvent", KEY | {"event_type": "release", "timestamp": 3}, Key(7, 65, False)),
        ("RawMouseEvent", RAW, RawMouse(7, -3, 12, 1)),
        (
            "RawMouseEvent",
            {"last_x": 0, "last_y": 0, "button_flags": 1024, "button_data": 65416},
            RawMouse(7, 0, 0, 1024, -120),
        ),
        ("RawMouseEvent", RAW | {"us_flags": 8, "device_handle": None}, RawMouse(7, -3, 12, 1)),
        ("MouseEvent", {"event_type": "move", "x": -5, "y": 9, "button": None}, Mouse(7, "move", -5, 9)),
        (
            "MouseEvent",
            {"event_type": "click", "x": 5, "y": 9, "button": "x1", "pressed": False},
            Mouse(7, "click", 5, 9, "x1", False),
        ),
        ("MouseEvent", {"event_type": "scroll", "x": 5, "y": 9, "dx": 0, "dy": -2}, Mouse(7, "scroll", 5, 9, dy=-2)),
        ("ScreenCaptured", SCREEN, Screen(7, "one.png")),
        ("ScreenCaptured", {"media_ref": {"uri": "a.mkv", "pts_ns": 50}, "shape": [1, 2]}, Screen(7, ("a.mkv", 50))),
        ("ScreenCaptured", {"media_ref": {"uri": "data:image/png;base64,AAEC"}}, Screen(7, b"\0\1\2")),
        ("ScreenCaptured", PNG, Screen(7, PNG)),
        ("WindowInfo", {"title": "日本"}, Info(7, "WindowInfo", {"title": "日本"})),
    ],
)
def test_messages_are_read_in_every_wrapping(kind: str, message: Any, found: Any) -> None:
    plain = row(kind, message, time=7)
    assert events_of(plain) == [found]
    if isinstance(message, bytes):
        return
    wrapped = {key: value for key, value in plain.items() if key != "message"}
    for one in (message, json.dumps(message).encode(), envelope(kind, message, 7), envelope(kind, message).decode()):
        assert events_of(plain | {"message": one}) == [found]
        assert events_of(wrapped | {"mcap_message": one}) == [found]
    assert events_of(plain | {"message_type": kind, "topic": None}) == [found]


def test_what_is_written_is_read_again() -> None:
    for one in random_events(2000):
        if not isinstance(one, Screen):
            kind, message = message_of(one)
            assert event(kind, json.dumps(message), one.timestamp_ns) == one


BAD = {
    "unknown type": (
        row("KeybordEvent", KEY),
        "'message_type' = 'desktop/KeybordEvent' is not known (did you mean 'KeyboardEvent'?). Known: ScreenCaptured, "
        "KeyboardEvent, MouseEvent, RawMouseEvent,",
    ),
    "type of another kind": (row("x", KEY, message_type=3), "'message_type' = 3 is not known."),
    "key code": (
        row("KeyboardEvent", KEY | {"vk": 256}),
        "'message.vk' must be a whole number from 0 to 255, found 256. Fix it or remove the row.",
    ),
    "no key code": (row("KeyboardEvent", {"event_type": "press"}), "'message.vk' must be a whole number from 0 to 255"),
    "true is no number": (row("RawMouseEvent", RAW | {"last_x": True}), "'message.last_x' must be a whole number"),
    "half a pixel": (row("RawMouseEvent", RAW | {"last_y": 0.5}), "found 0.5."),
    "too far": (row("RawMouseEvent", RAW | {"last_y": 100_000}), "from -99,999 to 99,999, found 100000."),
    "flags": (
        row("RawMouseEvent", RAW | {"button_flags": 4096}),
        "'message.button_flags' must be a whole number from 0",
    ),
    "absolute": (
        row("RawMouseEvent", RAW | {"us_flags": 1}),
        "'message.us_flags' = 1 says that last_x and last_y are pos",
    ),
    "press or release": (
        row("KeyboardEvent", {"event_type": "down", "vk": 1}),
        "'message.event_type' must be one of press, release, found 'down'.",
    ),
    "button": (
        row("MouseEvent", {"event_type": "click", "x": 1, "y": 1, "button": "thumb", "pressed": True}),
        "'message.button' must be one of unknown, left, middle, right, x1, x2, found 'thumb'.",
    ),
    "pressed": (
        row("MouseEvent", {"event_type": "click", "x": 1, "y": 1, "button": "left"}),
        "'message.pressed' must be true or false, found null.",
    ),
    "not JSON": (row("KeyboardEvent", "{vk: 1}"), "'message' is not JSON ("),
    "a list": (row("KeyboardEvent", "[1]"), "'message' must be a JSON object, found a list."),
    "no picture": (row("ScreenCaptured", {"shape": [1, 1]}), "a screen needs its picture in media_ref:"),
    "a URL": (
        row("ScreenCaptured", {"media_ref": {"uri": "https://x.org/a.png"}}),
        "is a URL, and screens are not down",
    ),
    "position": (
        row("ScreenCaptured", {"media_ref": {"uri": "a.mkv", "pts_ns": -1}}),
        "media_ref.pts_ns = -1: it must be",
    ),
    "data URI": (row("ScreenCaptured", {"media_ref": {"uri": "data:image/png,abc"}}), "this data URI cannot be read"),
    "base64": (
        row("ScreenCaptured", {"media_ref": {"uri": "data:image/png;base64,A"}}),
        "this data URI cannot be read",
    ),
    "time": (row("KeyboardEvent", KEY, time="0"), "'timestamp_ns' must be a whole number, found '0'."),
    "columns": ({"episode_path": "a", "text": "x"}, "Keys found: 'episode_path', 'text'. Needed: episode_path, topic,"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named(name: str) -> None:
    bad, said = BAD[name]
    rows = [row("KeyboardEvent", KEY, episode=bad["episode_path"]), bad]
    with pytest.raises(DataError) as caught:
        only_episode(rows)
    assert str(caught.value).startswith("events.jsonl:2: ")
    assert said in str(caught.value)


# --- episodes


def test_rows_are_grouped_into_episodes() -> None:
    rows = [row("KeyboardEvent", KEY, time, name) for name, time in (("a", 5), ("a", 5), ("b", 0), ("c", 1), ("c", 2))]
    episodes = Episodes(listed(rows))
    found = [read_episode(record) for record in everything(episodes)]
    assert [(one.path, [event.timestamp_ns for event in one.events]) for one in found] == [
        ("a", [5, 5]),
        ("b", [0]),
        ("c", [1, 2]),
    ]
    assert episodes.where(2) == "events.jsonl:4 (2 rows of one episode)"


def test_time_that_goes_back_is_an_error() -> None:
    rows = [row("KeyboardEvent", KEY, time) for time in (10, 30, 20)]
    said = r"events.jsonl:3: 'timestamp_ns' = 20 comes after 30 in the episode 'a.mcap'.* Sort the rows by episode_path"
    with pytest.raises(DataError, match=said):
        only_episode(rows)


def test_an_episode_in_two_places_is_an_error() -> None:
    rows = [row("KeyboardEvent", KEY, 0, name) for name in ("a", "b", "a")]
    said = r"events.jsonl:3: 'episode_path' = 'a' is here again.* first row is events.jsonl:1. Sort the rows"
    with pytest.raises(DataError, match=said):
        Episodes(listed(rows))


@pytest.mark.parametrize("path", [None, "", 3])
def test_an_episode_without_a_name_is_an_error(path: Any) -> None:
    with pytest.raises(DataError, match=r"events.jsonl:1: 'episode_path' must be the name of the recording, found"):
        Episodes(listed([row("KeyboardEvent", KEY, episode=path)]))


def test_an_empty_episode_is_an_error() -> None:
    with pytest.raises(
        DataError, match=r"the episode 'a.mcap' is empty: it has 1 message about windows and state, but"
    ):
        only_episode([row("WindowInfo", {"title": "x"})])
    with pytest.raises(DataError, match=r"the episode 'b' is empty: it has no event, but no screen, keyboard or mouse"):
        read_episode({"episode_path": "b", "rows": [], "places": []})
    with pytest.raises(DataError, match=r"the episode 'b' is empty"):
        only_episode([bin_row(0, 0)])


def test_screens_are_looked_for_at_the_root_and_beside_the_episode(tmp_path: Path) -> None:
    (tmp_path / "day1").mkdir()
    (tmp_path / "day1" / "one.png").touch()
    rows = [row("ScreenCaptured", SCREEN, episode="day1/a.mcap")]
    assert only_episode(rows, image_root=tmp_path).events == [Screen(0, "day1/one.png")]
    (tmp_path / "two.png").touch()
    rows = [row("ScreenCaptured", {"media_ref": {"uri": "two.png", "pts_ns": 3}}, episode="day1/a.mcap")]
    assert only_episode(rows, image_root=tmp_path).events == [Screen(0, ("two.png", 3))]
    rows = [row("ScreenCaptured", {"media_ref": {"uri": "no.png"}}, episode="day1/a.mcap")]
    with pytest.raises(DataError) as caught:
        only_episode(rows, image_root=tmp_path)
    assert str(caught.value).startswith(
        "events.jsonl:1: the screen 'no.png' of the episode 'day1/a.mcap' does not exist."
    )
    assert f"Looked for: {tmp_path}/no.png and {tmp_path}/day1/no.png." in str(caught.value)


# --- binned


def bin_row(number: int, time: int, state: Any = (), actions: Any = ()) -> dict[str, Any]:
    found = {"episode_path": "b", "bin_idx": number, "timestamp_ns": time}
    return found | {"state": list(state), "actions": list(actions)}


def test_bins_have_screens_first() -> None:
    rows = [
        bin_row(0, 100, [envelope("ScreenCaptured", {"media_ref": {"uri": "data:;base64,AA=="}}, 90)]),
        bin_row(2, 200, [PNG], [envelope("KeyboardEvent", KEY, 230), envelope("RawMouseEvent", RAW, 240)]),
        bin_row(3, 300, [{"media_ref": {"uri": "data:;base64,AA=="}}], [envelope("KeyboardEvent", KEY)]),
    ]
    assert only_episode(rows).events == [
        Screen(100, b"\0"),
        Screen(200, PNG),
        Key(230, 65, True),
        RawMouse(240, -3, 12, 1),
        Screen(300, b"\0"),
        Key(300, 65, True),
    ]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [bin_row(0, 0, [PNG]), bin_row(0, 1, [PNG])],
            "events.jsonl:2: 'bin_idx' = 0 comes after 0 in the episode 'b'",
        ),
        ([bin_row(0, 9, [PNG]), bin_row(1, 1, [PNG])], "events.jsonl:2: 'timestamp_ns' = 1 comes after 9"),
        (
            [bin_row(0, 0, [PNG], [KEY])],
            "events.jsonl:1: 'actions[0]' has no message_type. Keys found: 'event_type', 'vk'",
        ),
        (
            [bin_row(0, 0, [envelope("KeyboardEvent", KEY)])],
            "'state[0]' is a desktop/KeyboardEvent: screens belong in sta",
        ),
        ([bin_row(0, 0, [PNG]) | {"actions": {}}, bin_row(1, 0, [PNG]) | {"actions": "x"}], "'actions' must be a list"),
    ],
)
def test_bad_bins(rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(DataError) as caught:
        only_episode(rows)
    assert said in str(caught.value)


# --- tokenised


def window(**other: Any) -> dict[str, Any]:
    found = {"episode_path": "a", "input_ids": [5, 6, 7, 0], "attention_mask": [1, 1, 1, 0], "texts": "..."}
    return found | {"images": [json.dumps({"media_ref": {"uri": "a.mkv", "pts_ns": 2}}), PNG]} | other


def test_tokenised_rows_lose_their_padding() -> None:
    found = tokenised(window())
    assert (found.episode_path, found.input_ids, found.images) == ("a", [5, 6, 7], [("a.mkv", 2), PNG])
    assert tokenised(window(images=[])).images == []


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"attention_mask": [1, 1, 1]}, "'attention_mask' has 3 entries for the 4 of 'input_ids'."),
        ({"attention_mask": [0, 1, 1, 1]}, "'attention_mask' has other than 1 for every token and then 0 for padding."),
        ({"attention_mask": [2, 1, 1, 0]}, "'attention_mask' has other than 1"),
        ({"attention_mask": [0, 0, 0, 0]}, "'attention_mask' has no 1."),
        (
            {"input_ids": [1, -1, 2, 3]},
            "'input_ids' must be a list of non-negative integers, found [1, -1, 2, 3].",
        ),
        ({"input_ids": "abc"}, "'input_ids' must be a list of non-negative integers"),
        ({"images": "a.png"}, "'images' must be a list of screens, found a string."),
        ({"images": ["a.png"]}, "'images[0]' is not JSON"),
    ],
)
def test_bad_tokenised_rows(bad: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as caught:
        tokenised(window(**bad))
    assert said in str(caught.value)


def test_forms_are_told_apart() -> None:
    assert form_of(row("KeyboardEvent", KEY)) == "events"
    assert form_of(row("KeyboardEvent", KEY) | {"message": None, "mcap_message": b"{}"}) == "events"
    assert form_of(bin_row(0, 0)) == "binned"
    assert form_of(window()) == "tokenised"
    for other in ({"text": "x"}, {"messages": []}, {"input_ids": [1]}, row("KeyboardEvent", KEY) | {"message": None}):
        assert form_of(other) is None
