"""Rows, and random events of every kind."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fullshard.contracts.data import Record
from fullshard.data.records import Listed
from fullshard.families.vision.desktop.episodes import Episode, Episodes, read_episode
from fullshard.families.vision.desktop.events import BUTTONS, Event, Info, Key, Mouse, RawMouse, Screen

KEY = {"event_type": "press", "vk": 65}
RAW = {"last_x": -3, "last_y": 12, "button_flags": 1, "button_data": 0}
SCREEN = {"media_ref": {"uri": "one.png"}}


def row(kind: str, message: Any, time: int = 0, episode: str = "a.mcap", **other: Any) -> dict[str, Any]:
    topic = {"ScreenCaptured": "screen", "KeyboardEvent": "keyboard"}.get(kind, "mouse/raw")
    found = {"episode_path": episode, "topic": topic, "timestamp_ns": time, "message_type": f"desktop/{kind}"}
    return found | {"message": message if isinstance(message, bytes | str) else json.dumps(message)} | other


def listed(rows: list[dict[str, Any]]) -> Listed:
    return Listed(rows, where=lambda index: f"events.jsonl:{index + 1}", fingerprint=lambda: "x")


def only_episode(rows: list[dict[str, Any]], **settings: Any) -> Episode:
    (record,) = everything(Episodes(listed(rows)))
    return read_episode(record, **settings)


def everything(records: Any) -> list[Record]:
    return [records[index] for index in range(len(records))]


def random_events(count: int, seed: int = 0) -> Iterator[Event]:
    """Keys, mouse and screens, small and large, at any time."""
    rng = random.Random(seed)

    def number(most: int) -> int:
        return rng.choice((0, 1, -1, most, -most, rng.randint(-most, most), rng.randint(-20, 20)))

    def time() -> int:
        return rng.choice((0, 1, 9_999_999, 10_000_000, rng.randrange(2 * 10**18), -rng.randrange(10**10)))

    for index in range(count):
        flags, wheel = rng.choice((0, rng.randrange(0x1000))), rng.choice((0, number(0x7FFF), 120 * rng.randint(-9, 9)))
        place = number(99_999), number(99_999)
        button, pressed = rng.choice(BUTTONS), rng.random() < 0.5
        turn: dict[str, int] = {"dx": number(1_999), "dy": number(1_999)}
        yield (
            Key(time(), index % 256, pressed),
            RawMouse(time(), number(1_999), number(1_999), flags, wheel),
            RawMouse(time(), number(6_000), number(6_000), flags),
            Mouse(time(), "move", *place),
            Mouse(time(), "click", *place, button, pressed),
            Mouse(time(), "scroll", *place, dx=turn["dx"], dy=turn["dy"]),
            Screen(time(), b"picture"),
        )[rng.randrange(7)]


def random_infos(count: int) -> Iterator[Info]:
    """Window titles with what titles may have in them."""
    rng = random.Random(1)
    parts = ["<EVENT_END>", "<image>", "<", '"', "\\", "\n", "\u2028", "ä", "日本語", "🚀", "e\u0301", "]]>", "a"]
    for _ in range(count):
        message: Mapping[str, Any] = {
            "title": "".join(rng.choices(parts, k=rng.randrange(8))),
            "rect": [rng.randint(-9, 9) for _ in range(4)],
            "hWnd": rng.randrange(2**40),
        }
        yield Info(rng.randrange(2 * 10**18), "WindowInfo", message)


def pieces(text: str) -> list[str]:
    """Text in event tokens and what is between them; a tokenizer may cut the latter further."""
    return re.findall(r"<[A-Za-z0-9_]+>|(?:(?!<[A-Za-z0-9_]+>).)+", text, flags=re.DOTALL)


class Pieces:
    """A tokenizer that gives every piece of text a number."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def convert_tokens_to_ids(self, token: str) -> int:
        return self._known.setdefault(token, len(self._known))

    def decode(self, ids: list[int], **settings: bool) -> str:
        return "".join(list(self._known)[one] for one in ids)
