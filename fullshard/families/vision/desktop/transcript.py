"""The tokens of a window for a person to read: each event in words, and when it happens.

Shows what is trained on, not what was meant: events are decoded from their tokens. Must not know files or the layout
of samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fullshard.families.vision.desktop.events import (
    NOTCH,
    SIDE_WHEEL,
    Event,
    Key,
    Mouse,
    RawMouse,
    Screen,
    buttons_of,
    key_name,
)
from fullshard.families.vision.desktop.spans import spans
from fullshard.families.vision.desktop.token_format import EPISODE_END, EPISODE_START, EventFormat
from fullshard.formatting.plural import plural

_EPISODE = {EPISODE_START: "start of the episode", EPISODE_END: "end of the episode"}
Shown = tuple[str, int, int]
"""A picture in words, its first token and the token after its last."""


def passages(
    ids: Sequence[int], tokenizer: Any, form: EventFormat, screens: Sequence[Shown]
) -> Iterator[tuple[str, int]]:
    """What each event of a window says, and its number of tokens."""
    covered = {at for _, start, stop in screens for at in range(start, stop)}
    first = None
    for span in spans(ids, tokenizer, form, pictures=covered):
        inside = [shown for shown in screens if span.start <= shown[1] < span.stop]
        if span.event is not None and first is None:
            first = span.event.timestamp_ns
        said = _EPISODE[span.marker] if span.marker else _said(span.event, inside, form, first or 0)
        yield said, span.stop - span.start


def _said(event: Event | None, screens: Sequence[Shown], form: EventFormat, first: int) -> str:
    pictures = " ".join(words for words, _, _ in screens)
    if event is None:
        return " ".join(filter(None, ["not an event of this format", pictures]))
    said = pictures if isinstance(event, Screen) and pictures else " ".join(filter(None, [words(event), pictures]))
    # The clock of tokens starts again at 0 from time to time.
    return f"{(event.timestamp_ns - first) % form.clock_ns / 1e9:.3f} s  {said}"


def words(event: Event) -> str:
    """An event in words."""
    match event:
        case Screen():
            return "screen"
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
