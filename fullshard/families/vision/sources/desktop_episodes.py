"""Generated desktop recordings: a pointer goes to buttons and clicks them, then letters are typed into a field.

Every action can be read off the screen before it: where the button is, whether the pointer is on it, which letter is
asked for, whether a button or key is down. Screens are drawn when a record is read. Must not know tokens, batches or
ranks.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import Field

from fullshard.contracts.data import Record, Records, Source
from fullshard.data.records import Listed, combine
from fullshard.families.vision.desktop.events import Event, Key, RawMouse, Screen
from fullshard.families.vision.desktop.rows import message_of

LEFT_DOWN, LEFT_UP = 0x001, 0x002
_STEP_NS, _REACTION_NS = 100_000_000, 50_000_000
_TARGETS, _FARTHEST = 2, 3
"""Buttons to click, and how many cells away the next one may be: near, so that the last move does not give the next one
away."""
_LETTERS = {"A": (220, 60, 60), "B": (60, 160, 70), "C": (60, 90, 220), "D": (200, 150, 30)}
"""The letters to type, and the colour that each is asked for in."""
_TYPED = 2
_BUTTON_COLOURS = (60, 60, 150), (200, 200, 256)
"""Red, green and blue from and to: never yellow, the frame of a button that is down."""
_WHITE, _YELLOW, _GREY = (245, 245, 245), (255, 255, 0), (120, 120, 120)


class DesktopEpisodes(Source):
    """Rows `episode_path, topic, timestamp_ns, message_type, message`: screens (PNG), mouse and keys."""

    episodes: int = Field(200, ge=1)
    """The number of recordings."""
    start: int = Field(0, ge=0)
    """The number of the first one; use different ones for data.train and data.validation."""
    seed: int = Field(0, ge=0, lt=2**63)
    """The random seed of the recordings."""
    size: int = Field(64, ge=32, le=1024, multiple_of=8)
    """The width and height of the screen in pixels."""
    cells: Literal[4, 8] = 8
    """The pointer moves on a grid of this many cells across and down, one cell at a time, in any of 8 directions."""

    def open(self) -> Records:
        numbers = range(self.start, self.start + self.episodes)
        rows = _Rows([row for number in numbers for row in _recording(number, self)], self)
        return Listed(
            rows,
            where=lambda index: f"generated episode {rows.planned[index].number}, row {index + 1}",
            # With a picture, so that other drawings are other data.
            fingerprint=lambda: combine("desktop_episodes", self.model_dump_json(), rows[0]["message"].hex()),
        )


@dataclass(frozen=True)
class _View:
    """All that a screen shows. Places are cells, across and down."""

    pointer: tuple[int, int]
    button: tuple[int, int]
    colour: tuple[int, ...]
    background: tuple[int, ...]
    pressed: bool = False
    asked: str = ""
    typed: str = ""


@dataclass(frozen=True)
class _Row:
    number: int
    event: Event
    view: _View


class _Rows(Sequence[Record]):
    """Records that are drawn when they are read."""

    def __init__(self, planned: list[_Row], settings: DesktopEpisodes) -> None:
        self.planned, self._settings = planned, settings

    def __len__(self) -> int:
        return len(self.planned)

    def __getitem__(self, index: Any) -> Any:
        row = self.planned[index]
        kind, message = message_of(row.event)
        return {
            "episode_path": f"generated/episode-{row.number:06d}",
            "topic": {Screen: "screen", Key: "keyboard", RawMouse: "mouse/raw"}[type(row.event)],
            "timestamp_ns": row.event.timestamp_ns,
            "message_type": f"desktop/{kind}",
            "message": draw(row.view, self._settings.size, self._settings.cells)
            if isinstance(row.event, Screen)
            else json.dumps(message),
        }

    def _drawn(self, view: _View) -> bytes:
        return draw(view, self._settings.size, self._settings.cells)


def _recording(number: int, settings: DesktopEpisodes) -> Iterator[_Row]:
    """A screen before each action. Recordings start a minute apart."""
    rng = np.random.default_rng([settings.seed, number])
    time, cell = number * 60 * 10**9, settings.size // settings.cells
    for seen, action in _actions(rng, settings.cells):
        if isinstance(action, RawMouse):
            action = replace(action, dx=action.dx * cell, dy=action.dy * cell)
        yield _Row(number, Screen(time), seen)
        yield _Row(number, replace(action, timestamp_ns=time + _REACTION_NS), seen)
        time += _STEP_NS


def _actions(rng: np.random.Generator, cells: int) -> Iterator[tuple[_View, Key | RawMouse]]:
    """Each screen and the action that follows; movement is in cells."""
    pointer = _cell(rng.integers(cells, size=2))
    view = _View(pointer, pointer, colour=(), background=tuple(rng.integers(10, 60, size=3).tolist()))
    for _ in range(_TARGETS):
        view = replace(
            view, button=_near(rng, view.pointer, cells), colour=tuple(rng.integers(*_BUTTON_COLOURS).tolist())
        )
        while view.pointer != view.button:
            across, down = (_sign(to - at) for at, to in zip(view.pointer, view.button, strict=True))
            yield view, RawMouse(0, across, down)
            view = replace(view, pointer=(view.pointer[0] + across, view.pointer[1] + down))
        yield view, RawMouse(0, 0, 0, flags=LEFT_DOWN)
        yield replace(view, pressed=True), RawMouse(0, 0, 0, flags=LEFT_UP)
    for letter in rng.choice(list(_LETTERS), size=_TYPED).tolist():
        view = replace(view, asked=letter)
        yield view, Key(0, ord(letter), pressed=True)
        view = replace(view, typed=view.typed + letter)
        yield replace(view, pressed=True), Key(0, ord(letter), pressed=False)


def _near(rng: np.random.Generator, place: tuple[int, int], cells: int) -> tuple[int, int]:
    """Another cell, not far away."""
    while True:
        other = _cell(np.clip(place + rng.integers(-_FARTHEST, _FARTHEST + 1, size=2), 0, cells - 1))
        if other != place:
            return other


def _cell(place: np.ndarray) -> tuple[int, int]:
    return int(place[0]), int(place[1])


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)


@functools.cache
def draw(view: _View, size: int, cells: int = 8) -> bytes:
    """A screen as PNG: the button in its colour and the pointer as a white cross; or the letter to type above a field
    with what was typed. A frame turns yellow while a button or key is down."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (size, size), view.background)
    pen, cell = ImageDraw.Draw(image), size // cells
    left, top = (place * cell for place in view.button)
    frame = _YELLOW if view.pressed and not view.asked else view.colour
    pen.rectangle((left, top, left + cell - 1, top + cell - 1), fill=view.colour, outline=frame, width=cell // 4)
    x, y = (place * cell + cell // 2 for place in view.pointer)
    for arm in ((x - cell // 2 + 1, y, x + cell // 2 - 1, y), (x, y - cell // 2 + 1, x, y + cell // 2 - 1)):
        pen.line(arm, fill=_WHITE, width=max(cell // 8, 1))
    cell = size // 8
    if view.asked:
        pen.rectangle((cell, cell, size - cell - 1, size - cell - 1), fill=_WHITE)
        pen.text((size // 2, 3 * cell), view.asked, fill=_LETTERS[view.asked], font=_font(3 * cell), anchor="mm")
        field = (2 * cell, 5 * cell, size - 2 * cell - 1, size - 2 * cell + cell // 2)
        pen.rectangle(field, outline=_YELLOW if view.pressed else _GREY, width=max(cell // 4, 1))
        pen.text((size // 2, 6 * cell), view.typed, fill=(0, 0, 0), font=_font(cell), anchor="mm")
    file = io.BytesIO()
    image.save(file, format="PNG", compress_level=1)
    return file.getvalue()


@functools.cache
def _font(height: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(height)


__all__ = ["DesktopEpisodes"]
