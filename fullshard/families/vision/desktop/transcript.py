"""A window for a person to read: when, what happens, its tokens, and a T under each token that is trained on.

Must not know how tokens become numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from fullshard.families.vision.desktop.events import (
    NOTCH,
    SIDE_WHEEL,
    Event,
    ImageRef,
    Key,
    Mouse,
    RawMouse,
    Screen,
    buttons_of,
    key_name,
)
from fullshard.families.vision.desktop.token_format import EPISODE_START
from fullshard.families.vision.desktop.windows import Image, Segment, Text, Window
from fullshard.formatting.plural import counted, plural

WIDTH = 110
"""Columns for tokens."""
_INDENT = " " * 12


def pieces(text: str) -> list[str]:
    """Text in event tokens and what is between them; a tokenizer may cut the latter further."""
    return re.findall(r"<[A-Za-z0-9_]+>|(?:(?!<[A-Za-z0-9_]+>).)+", text, flags=re.DOTALL)


def transcript(window: Window, split: Callable[[str], Sequence[str]] = pieces) -> str:
    """All events of a window. `split` gives the tokens of a text as the tokenizer cuts it."""
    lines, trained, total, events, start = list[str](), 0, 0, 0, None
    for _, group in groupby(window.segments, key=lambda segment: id(segment.event)):
        segments = list(group)
        event = segments[0].event
        cells = [cell for segment in segments for cell in _cells(segment, split)]
        trained += sum(size for _, size, mark in cells if mark)
        total += sum(size for _, size, _ in cells)
        events += event is not None
        if event is not None and start is None:
            start = event.timestamp_ns
        when = "" if event is None or start is None else f"{(event.timestamp_ns - start) / 1e9:.3f} s"
        lines += ["", f"{when:>10}  {words(event) if event else _marker(segments[0])}", *_table(cells)]
    counts = [counted(events, "event"), counted(len(window.images), "screen"), counted(total, "token")]
    return "\n".join([f"{window.episode_path}: {', '.join(counts)}, {trained:,} trained on (T)", *lines])


def words(event: Event) -> str:
    """An event in words."""
    match event:
        case Screen():
            return f"screen: {_picture(event.image)}"
        case Key():
            return f"{'press' if event.pressed else 'release'} {key_name(event.key)}"
        case RawMouse():
            return f"mouse: {'; '.join(_raw(event)) or 'nothing'}"
        case Mouse(action="click"):
            return f"pointer: {event.button} button {'down' if event.pressed else 'up'} at ({event.x}, {event.y})"
        case Mouse(action="scroll"):
            return f"pointer: scroll by ({event.dx}, {event.dy}) at ({event.x}, {event.y})"
        case Mouse():
            return f"pointer: move to ({event.x}, {event.y})"
    return f"{event.message_type}: {dict(event.message)}"


def _raw(event: RawMouse) -> Iterator[str]:
    across, down = ("left", "right")[event.dx > 0], ("up", "down")[event.dy > 0]
    moved = [f"{abs(by)} {way}" for by, way in ((event.dx, across), (event.dy, down)) if by]
    if moved:
        yield f"move {', '.join(moved)}"
    yield from (f"{name} button {'down' if pressed else 'up'}" for name, pressed in buttons_of(event.flags))
    if event.wheel:
        yield f"{'side wheel' if event.flags & SIDE_WHEEL else 'wheel'} {event.wheel / NOTCH:+g} {plural(2, 'notch')}"


def _picture(image: ImageRef | None) -> str:
    if isinstance(image, tuple):
        return f"{image[0]} at {image[1] / 1e9:.3f} s"
    return image if isinstance(image, str) else f"an image of {counted(len(image), 'byte')}" if image else "not known"


def _marker(segment: Segment) -> str:
    return (
        "start of the episode" if isinstance(segment, Text) and segment.text == EPISODE_START else "end of the episode"
    )


def _cells(segment: Segment, split: Callable[[str], Sequence[str]]) -> list[tuple[str, int, bool]]:
    """What is shown, the number of tokens, and whether they are trained on."""
    if isinstance(segment, Image):
        return [(f"[{counted(segment.tokens, 'image token')}]", segment.tokens, False)]
    return [(token.replace("\n", "\\n"), 1, segment.trained) for token in split(segment.text)]


def _table(cells: Sequence[tuple[str, int, bool]]) -> Iterator[str]:
    """Lines of tokens, each with its marks below."""
    tokens = marks = ""
    for token, _, trained in [*cells, ("", 0, False)]:
        if tokens and (not token or len(tokens) + len(token) > WIDTH):
            yield f"{_INDENT}{tokens}".rstrip()
            if marks.strip():
                yield f"{_INDENT}{marks}".rstrip()
            tokens = marks = ""
        tokens += f"{token} "
        marks += "T".ljust(len(token) + 1) if trained else " " * (len(token) + 1)
