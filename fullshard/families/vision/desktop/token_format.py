"""What the two token formats share: the order of an event's tokens, rounding, and reading them back.

    <EVENT_START><KEYBOARD>TIME KEY <press>|<release><EVENT_END>
    <EVENT_START><MOUSE>TIME MOVEMENT FLAGS [NOTCHES]<EVENT_END>                               raw mouse
    <EVENT_START><POINTER>TIME POSITION <move>|<click>BUTTON <press>|<release>|<scroll>TURN<EVENT_END>
    <EVENT_START><SCREEN>TIME<EVENT_END>                                         the picture goes before <EVENT_END>

Must not know rows, windows or tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any, Protocol

from fullshard.families.vision.desktop.events import (
    BUTTONS,
    NOTCH,
    SIDE_WHEEL,
    WHEEL,
    Event,
    Info,
    Key,
    Mouse,
    RawMouse,
    Screen,
)

EVENT_START, EVENT_END = "<EVENT_START>", "<EVENT_END>"
EPISODE_START, EPISODE_END = "<EPISODE_START>", "<EPISODE_END>"
MARKERS = [EPISODE_START, EPISODE_END, EVENT_START, EVENT_END]
"""The tokens of every format."""
TIME_UNIT_NS = 10_000_000
_KINDS = {Key: "<KEYBOARD>", RawMouse: "<MOUSE>", Mouse: "<POINTER>", Screen: "<SCREEN>"}
_PRESSED = {True: "<press>", False: "<release>"}
_ACTIONS = ["<move>", "<click>", "<scroll>"]
_BUTTONS = [f"<BUTTON_{name}>" for name in BUTTONS]
STRUCTURE = [*MARKERS, *_KINDS.values(), *_PRESSED.values(), *_ACTIONS, *_BUTTONS]
"""The tokens that both token formats have."""


class EventFormat(Protocol):
    """Events to text and back. `decode(encode(event)) == rounded(event)` for every event that it `takes`."""

    @property
    def clock_ns(self) -> int:
        """After this time the clock starts again at 0."""
        ...

    def vocabulary(self) -> list[str]:
        """The tokens to add to a tokenizer, always in the same order."""
        ...

    def takes(self, event: Event) -> bool:
        """Whether the format can encode this kind of event."""
        ...

    def rounded(self, event: Event) -> list[Event]:
        """What remains of an event after encoding; several events if one cannot hold all of it."""
        ...

    def encode(self, event: Event) -> str:
        """The text of an event. A screen's picture goes before its last token."""
        ...

    def decode(self, text: str) -> list[Event]:
        """The events of a text. Raises ValueError if it is not a sequence of whole events."""
        ...


def bodies(text: str) -> Iterator[str]:
    """What is between the start and the end of each event of a text."""
    between = re.split(f"{EVENT_START}(.*?){EVENT_END}", text, flags=re.DOTALL)
    for other in between[::2]:
        if left := re.sub(f"{EPISODE_START}|{EPISODE_END}", "", other).strip():
            raise ValueError(f"not an event: {left[:60]!r}")
    yield from between[1::2]


class TokenFormat:
    """Time is counted in units of 10 ms and wraps around at the product of `time_bases`. Movement beyond ±1,999 pixels
    and turns of the wheel beyond ±9 notches become several events with the same time. The wheel is rounded to notches;
    nothing else is lost."""

    time_bases: tuple[int, ...]
    move_bases: tuple[int, ...]
    place_bases: tuple[int, ...]
    notch_bases: tuple[int, ...] = (10,)
    keys: tuple[str, ...]
    """The tokens of the 256 keys."""
    flags: tuple[str, ...]
    """The tokens of the 16 values of four flags."""
    digits: tuple[str, ...]
    signs: tuple[str, ...] = ()

    @property
    def clock_ns(self) -> int:
        return prod(self.time_bases) * TIME_UNIT_NS

    def vocabulary(self) -> list[str]:
        return list(dict.fromkeys([*STRUCTURE, *self.keys, *self.flags, *self.digits, *self.signs]))

    def takes(self, event: Event) -> bool:
        return not isinstance(event, Info)

    def rounded(self, event: Event) -> list[Event]:
        unit = event.timestamp_ns // TIME_UNIT_NS % prod(self.time_bases)
        event = replace(event, timestamp_ns=unit * TIME_UNIT_NS)
        if isinstance(event, Screen):
            return [replace(event, image=None)]
        return list(self._parts(event)) if isinstance(event, RawMouse) else [event]

    def _parts(self, event: RawMouse) -> Iterator[RawMouse]:
        """Equal parts, each small enough; buttons come with the last."""
        notches = round(abs(event.wheel) / NOTCH) * (1 if event.wheel > 0 else -1)
        moved = max(abs(event.dx), abs(event.dy))
        count = max(1, ceil(moved / (prod(self.move_bases) - 1)), ceil(abs(notches) / (prod(self.notch_bases) - 1)))

        def part(total: int, number: int) -> int:
            return total * (number + 1) // count - total * number // count

        for number in range(count):
            kept = 0xFFF if number == count - 1 else WHEEL | SIDE_WHEEL
            turned = part(notches, number) * NOTCH
            yield RawMouse(
                event.timestamp_ns, part(event.dx, number), part(event.dy, number), event.flags & kept, turned
            )

    def encode(self, event: Event) -> str:
        return "".join("".join([EVENT_START, *self._tokens(one), EVENT_END]) for one in self.rounded(event))

    def _tokens(self, event: Any) -> Iterator[str]:
        yield _KINDS[type(event)]
        yield from self._digits(event.timestamp_ns // TIME_UNIT_NS, self.time_bases)
        match event:
            case Key():
                yield from (self.keys[event.key], _PRESSED[event.pressed])
            case RawMouse():
                yield from self._pair(event.dx, event.dy, self.move_bases)
                yield from (self.flags[event.flags >> shift & 15] for shift in (8, 4, 0))
                if event.wheel:
                    yield from self._number(event.wheel // NOTCH, self.notch_bases)
            case Mouse():
                yield from self._pair(event.x, event.y, self.place_bases)
                yield f"<{event.action}>"
                if event.action == "click":
                    yield from (f"<BUTTON_{event.button}>", _PRESSED[bool(event.pressed)])
                if event.action == "scroll":
                    yield from self._pair(event.dx, event.dy, self.move_bases)

    def decode(self, text: str) -> list[Event]:
        return [self._event(Reader(body)) for body in bodies(text)]

    def _event(self, tokens: Reader) -> Event:
        kind = list(_KINDS)[tokens.one_of(list(_KINDS.values()))]
        time = self._value(tokens, self.time_bases) * TIME_UNIT_NS
        if kind is Screen:
            return Screen(time)
        event = self._action(kind, time, tokens)
        tokens.end()
        return event

    def _action(self, kind: type, time: int, tokens: Reader) -> Event:
        if kind is Key:
            return Key(time, tokens.one_of(self.keys), not tokens.one_of(list(_PRESSED.values())))
        if kind is RawMouse:
            dx, dy = self._read_pair(tokens, self.move_bases)
            flags = sum(tokens.one_of(self.flags) << shift for shift in (8, 4, 0))
            return RawMouse(time, dx, dy, flags, self._read(tokens, self.notch_bases) * NOTCH if tokens.left else 0)
        x, y = self._read_pair(tokens, self.place_bases)
        action: Any = ("move", "click", "scroll")[tokens.one_of(_ACTIONS)]
        if action == "click":
            button = BUTTONS[tokens.one_of(_BUTTONS)]
            return Mouse(time, action, x, y, button, not tokens.one_of(list(_PRESSED.values())))
        dx, dy = self._read_pair(tokens, self.move_bases) if action == "scroll" else (0, 0)
        return Mouse(time, action, x, y, dx=dx, dy=dy)

    def _digits(self, value: int, bases: Sequence[int]) -> list[str]:
        """A non-negative number, the highest digit first."""
        found = []
        for base in reversed(bases):
            value, digit = divmod(value, base)
            found.append(self.digits[digit])
        return found[::-1]

    def _value(self, tokens: Reader, bases: Sequence[int]) -> int:
        value = 0
        for base in bases:
            value = value * base + tokens.one_of(self.digits[:base])
        return value

    def _number(self, value: int, bases: Sequence[int]) -> list[str]:
        """A number with a sign."""
        raise NotImplementedError

    def _read(self, tokens: Reader, bases: Sequence[int]) -> int:
        raise NotImplementedError

    def _pair(self, first: int, second: int, bases: Sequence[int]) -> list[str]:
        return [*self._number(first, bases), *self._number(second, bases)]

    def _read_pair(self, tokens: Reader, bases: Sequence[int]) -> tuple[int, int]:
        return self._read(tokens, bases), self._read(tokens, bases)


class Reader:
    """Reads the tokens of an event one by one."""

    def __init__(self, body: str) -> None:
        self._body = body
        self.left = re.findall(r"<[^<>]*>|[^<]+|<", body)[::-1]

    def one_of(self, allowed: Sequence[str]) -> int:
        """The index of the next token among those allowed here."""
        token = self.left.pop() if self.left else "its end"
        if token not in allowed:
            raise ValueError(f"{token} cannot be here in the event {self._body!r}")
        return allowed.index(token)

    def end(self) -> None:
        if self.left:
            raise ValueError(f"{self.left[-1]} is one token too many in the event {self._body!r}")
