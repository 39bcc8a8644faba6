"""Reads the rows of desktop recordings, in three forms.

    events      one row per event: episode_path, topic, timestamp_ns, message_type, message (or mcap_message)
    binned      one row per time bin: episode_path, bin_idx, timestamp_ns, state (screens), actions
    tokenised   one row per finished window: input_ids, attention_mask, images, episode_path

Must not know episodes, files or tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fullshard.config.problems import did_you_mean, found, sort_of
from fullshard.contracts.data import Record
from fullshard.data.records import keys_found
from fullshard.errors import DataError
from fullshard.families.vision.desktop.events import BUTTONS, Event, ImageRef, Info, Key, Mouse, RawMouse, Screen
from fullshard.families.vision.desktop.screens import reference

Form = Literal["events", "binned", "tokenised"]

FARTHEST = 99_999
"""The largest movement or coordinate of a mouse, in pixels."""
MOST_SCROLL = 1_999
_MESSAGES = ("message", "mcap_message")
_INFO = ("KeyboardState", "MouseState", "WindowInfo", "PointerBallisticsConfig")
TYPES = ("ScreenCaptured", "KeyboardEvent", "MouseEvent", "RawMouseEvent", *_INFO)
"""The message types, as they are written after `desktop/`."""


@dataclass(frozen=True)
class Tokenised:
    """A window that was tokenised elsewhere."""

    episode_path: str
    input_ids: list[int]
    """Without padding."""
    images: list[ImageRef]


def form_of(record: Record) -> Form | None:
    """The form of a record, by its keys; None: not a row of a desktop recording."""
    keys = {key for key, value in record.items() if value is not None}
    if keys >= {"episode_path", "timestamp_ns", "message_type"} and keys & set(_MESSAGES):
        return "events"
    if keys >= {"episode_path", "bin_idx", "timestamp_ns"} and keys & {"state", "actions"}:
        return "binned"
    return "tokenised" if keys >= {"episode_path", "input_ids", "attention_mask", "images"} else None


def events_of(row: Record) -> list[Event]:
    """The events of a row, in chronological order."""
    form = form_of(row)
    if form == "events":
        return [_event_of(row)]
    if form == "binned":
        return _bin_events(row)
    raise DataError(
        f"this is not an event of a desktop recording. {keys_found(row)} Needed: episode_path, topic, timestamp_ns, "
        "message_type and message (or mcap_message); or, for time bins, episode_path, bin_idx, timestamp_ns, state and "
        "actions."
    )


def _event_of(row: Record) -> Event:
    name = next(name for name in _MESSAGES if row.get(name) is not None)
    return event(row["message_type"], row[name], whole(row, "timestamp_ns"), name)


def _bin_events(row: Record) -> list[Event]:
    """Screens at the start of the bin, then actions at their timestamps, or at the start if they have none."""
    start, events = whole(row, "timestamp_ns"), list[Event]()
    for name in ("state", "actions"):
        entries = row.get(name) or []
        if not isinstance(entries, list):
            raise DataError(f"{name!r} must be a list of messages, found {sort_of(entries)}. Write it as a list.")
        events += [_bin_event(entry, name, f"{name}[{number}]", start) for number, entry in enumerate(entries)]
    return events


def _bin_event(entry: Any, column: str, key: str, start: int) -> Event:
    if column == "state" and _is_image(entry):
        return Screen(start, bytes(entry))
    message = _object(entry, key)
    if column == "state" and "message_type" not in message:
        return Screen(start, reference(message))
    if "message_type" not in message:
        raise DataError(
            f"{key!r} has no message_type. {keys_found(message)} Write each action as {{message_type: ..., timestamp: "
            "..., message: ...}."
        )
    own = start if column == "state" else whole(message, "timestamp", within=key, default=start)
    made = event(message["message_type"], message, max(start, own), key)
    if isinstance(made, Screen) != (column == "state"):
        raise DataError(
            f"{key!r} is a {message['message_type']}: screens belong in state, and keyboard and mouse events in "
            "actions. Move it."
        )
    return made


def event(message_type: Any, message: Any, timestamp_ns: int, key: str = "message") -> Event:
    """The event in a message; `key` is where it was found."""
    name = re.split(r"[/.]", message_type)[-1] if isinstance(message_type, str) else ""
    if name not in TYPES:
        raise DataError(
            f"'message_type' = {found(message_type)} is not known{did_you_mean(name, TYPES)}. Known: "
            f"{', '.join(TYPES)}, with or without desktop/ before it. Fix it, or leave such rows out."
        )
    if name == "ScreenCaptured":
        return Screen(timestamp_ns, _image(message, key))
    inner = _message(message, key)
    if name == "KeyboardEvent":
        return _key(inner, timestamp_ns, key)
    if name == "RawMouseEvent":
        return _raw_mouse(inner, timestamp_ns, key)
    return _mouse(inner, timestamp_ns, key) if name == "MouseEvent" else Info(timestamp_ns, name, inner)


def _key(message: Mapping[str, Any], timestamp_ns: int, key: str) -> Key:
    kind = _word(message, "event_type", ("press", "release"), key)
    return Key(timestamp_ns, whole(message, "vk", 0, 255, within=key), kind == "press")


def _raw_mouse(message: Mapping[str, Any], timestamp_ns: int, key: str) -> RawMouse:
    if whole(message, "us_flags", 0, 0xFFFF, within=key, default=0) & 1:
        raise DataError(
            f"'{key}.us_flags' = {message['us_flags']} says that last_x and last_y are positions; only movement (an "
            "even number, such as 0) can be trained on. Convert positions to movement, or record MouseEvent instead."
        )
    dx, dy = (whole(message, name, -FARTHEST, FARTHEST, within=key) for name in ("last_x", "last_y"))
    flags = whole(message, "button_flags", 0, 0xFFF, within=key, default=0)
    wheel = whole(message, "button_data", -0x8000, 0xFFFF, within=key, default=0)
    return RawMouse(timestamp_ns, dx, dy, flags, wheel - 0x10000 if wheel >= 0x8000 else wheel)


def _mouse(message: Mapping[str, Any], timestamp_ns: int, key: str) -> Mouse:
    kind: Any = _word(message, "event_type", ("move", "click", "scroll"), key)
    x, y = (whole(message, name, -FARTHEST, FARTHEST, within=key) for name in ("x", "y"))
    if kind == "click":
        pressed = message.get("pressed")
        if not isinstance(pressed, bool):
            raise DataError(f"'{key}.pressed' must be true or false, found {found(pressed)}. Fix it or remove the row.")
        return Mouse(timestamp_ns, kind, x, y, _word(message, "button", BUTTONS, key), pressed)
    if kind == "move":
        return Mouse(timestamp_ns, kind, x, y)
    dx, dy = (whole(message, name, -MOST_SCROLL, MOST_SCROLL, within=key, default=0) for name in ("dx", "dy"))
    return Mouse(timestamp_ns, kind, x, y, dx=dx, dy=dy)


def message_of(event: Event) -> tuple[str, dict[str, Any]]:
    """The message type and message of an event, the inverse of `event`. Of a screen only the time is kept."""
    match event:
        case Key():
            return TYPES[1], {"event_type": "press" if event.pressed else "release", "vk": event.key}
        case RawMouse():
            moved = {"last_x": event.dx, "last_y": event.dy}
            return TYPES[3], {**moved, "button_flags": event.flags, "button_data": event.wheel}
        case Mouse():
            message: dict[str, Any] = {"event_type": event.action, "x": event.x, "y": event.y}
            more = {"click": ("button", "pressed"), "scroll": ("dx", "dy"), "move": ()}[event.action]
            return TYPES[2], message | {name: getattr(event, name) for name in more}
        case Info():
            return event.message_type, dict(event.message)
    return TYPES[0], {}


def tokenised(row: Record) -> Tokenised:
    """A row that holds a finished window."""
    ids, mask = (_numbers(row.get(name), name) for name in ("input_ids", "attention_mask"))
    images = row.get("images")
    if len(ids) != len(mask):
        raise DataError(
            f"'attention_mask' has {len(mask):,} entries for the {len(ids):,} of 'input_ids'. Write the row again."
        )
    size = sum(mask)
    if not size or mask != [1] * size + [0] * (len(mask) - size):
        problem = "no 1" if not any(mask) else "other than 1 for every token and then 0 for padding"
        raise DataError(f"'attention_mask' has {problem}. Put tokens first and padding last, or remove the row.")
    if not isinstance(images, list):
        raise DataError(f"'images' must be a list of screens, found {sort_of(images)}. Write it as a list.")
    screens = [_image(image, f"images[{number}]") for number, image in enumerate(images)]
    return Tokenised(str(row["episode_path"]), ids[:size], screens)


def _numbers(values: Any, name: str) -> list[int]:
    if not isinstance(values, list) or not all(isinstance(one, int) and one >= 0 for one in values):
        raise DataError(
            f"{name!r} must be a list of non-negative integers, found {found(values)}. Write the row again."
        )
    return values


def whole(
    message: Mapping[str, Any],
    name: str,
    low: int = -(2**63),
    high: int = 2**63 - 1,
    *,
    within: str = "",
    default: int | None = None,
) -> int:
    """An integer of a message, or an error that names its key."""
    value = default if message.get(name) is None else message[name]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        key = f"{within}.{name}" if within else name
        bounds = f" from {low:,} to {high:,}" if high < 2**63 - 1 else ""
        raise DataError(f"{key!r} must be a whole number{bounds}, found {found(value)}. Fix it or remove the row.")
    return value


def _word(message: Mapping[str, Any], name: str, allowed: Sequence[str], key: str) -> str:
    value = message.get(name)
    if value not in allowed:
        raise DataError(
            f"'{key}.{name}' must be one of {', '.join(allowed)}, found {found(value)}. Fix it or remove the row."
        )
    return str(value)


def _is_image(message: Any) -> bool:
    """Whether a message is the bytes of a picture, not JSON."""
    return isinstance(message, bytes | bytearray) and not message.lstrip().startswith(b"{")


def _image(message: Any, key: str) -> ImageRef:
    return bytes(message) if _is_image(message) else reference(_message(message, key))


def _message(message: Any, key: str) -> Mapping[str, Any]:
    """A message that may be in an envelope: {topic, timestamp, message_type, message}."""
    value = _object(message, key)
    return _object(value["message"], f"{key}.message") if "message_type" in value and "message" in value else value


def _object(message: Any, key: str) -> Mapping[str, Any]:
    """A JSON object, as text, bytes or already decoded."""
    value = message
    if isinstance(value, str | bytes | bytearray):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{key!r} is not JSON ({error}). Write the message as a JSON object.") from error
    if not isinstance(value, Mapping):
        raise DataError(f"{key!r} must be a JSON object, found {sort_of(value)}. Write the message as a JSON object.")
    return value
