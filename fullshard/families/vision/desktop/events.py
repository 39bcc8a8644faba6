"""The events of a desktop recording: screens, keys, mouse, and the state of windows.

Must not know rows, tokens or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ImageRef = str | bytes | tuple[str, int]
"""Where the picture of a screen is: the path of a file, its bytes, or a video file and the position in nanoseconds."""

PRESS_FLAGS = {0x001: "left", 0x004: "right", 0x010: "middle", 0x040: "x1", 0x100: "x2"}
"""The flags of raw mouse events for buttons that go down; twice the flag is the same button going up."""
WHEEL, SIDE_WHEEL = 0x400, 0x800
NOTCH = 120
"""What a wheel reports for one notch."""
BUTTONS = ("unknown", "left", "middle", "right", "x1", "x2")


@dataclass(frozen=True)
class Screen:
    """What the screen shows from this time on."""

    timestamp_ns: int
    image: ImageRef | None = None
    """None: not known, as in a screen decoded from text."""


@dataclass(frozen=True)
class Key:
    """A key goes down or up."""

    timestamp_ns: int
    key: int
    """The Windows virtual key code, 0 to 255."""
    pressed: bool


@dataclass(frozen=True)
class RawMouse:
    """What the mouse reports: movement, buttons and wheel, before the system turns it into a position."""

    timestamp_ns: int
    dx: int
    dy: int
    flags: int = 0
    """Windows RI_MOUSE_* flags, 12 bits: buttons that go down or up, and which wheel turns."""
    wheel: int = 0
    """How far the wheel turns, in 1/120 of a notch; positive: away from the user."""


@dataclass(frozen=True)
class Mouse:
    """The pointer at a position: it moves there, a button goes down or up, or the wheel turns."""

    timestamp_ns: int
    action: Literal["move", "click", "scroll"]
    x: int
    y: int
    button: str | None = None
    pressed: bool | None = None
    dx: int = 0
    dy: int = 0


@dataclass(frozen=True)
class Info:
    """The state of the keyboard, the mouse or a window: neither a screen nor an action."""

    timestamp_ns: int
    message_type: str
    message: Mapping[str, Any]


Event = Screen | Key | RawMouse | Mouse | Info
Action = Key | RawMouse | Mouse
"""What a model learns to predict."""

_KEYS = {
    **{8: "Backspace", 9: "Tab", 13: "Enter", 27: "Esc", 45: "Insert", 46: "Delete", 91: "Windows"},
    **dict(enumerate(("Shift", "Ctrl", "Alt", "Pause", "Caps Lock"), start=16)),
    **dict(enumerate(("Space", "Page Up", "Page Down", "End", "Home", "Left", "Up", "Right", "Down"), start=32)),
    **{96 + digit: f"Numpad {digit}" for digit in range(10)},
    **{111 + number: f"F{number}" for number in range(1, 25)},
    **dict(enumerate(("left Shift", "right Shift", "left Ctrl", "right Ctrl", "left Alt", "right Alt"), start=160)),
}


def key_name(key: int) -> str:
    """`A`, `Enter`, or `key 255`."""
    if 48 <= key <= 57 or 65 <= key <= 90:
        return chr(key)
    return _KEYS.get(key, f"key {key}")


def buttons_of(flags: int) -> list[tuple[str, bool]]:
    """The buttons in raw mouse flags, and whether each goes down."""
    found = []
    for flag, name in PRESS_FLAGS.items():
        found += [(name, True)] if flags & flag else []
        found += [(name, False)] if flags & (flag << 1) else []
    return found
