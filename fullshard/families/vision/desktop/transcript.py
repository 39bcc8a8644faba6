"""The tokens of a window for a person to read: each event in words, and when it happens.

Works on tokens alone, so that it shows what is trained on, not what was meant. Must not know files or the layout of
samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from fullshard.families.vision.desktop.token_format import (
    EPISODE_END,
    EPISODE_START,
    EVENT_END,
    EVENT_START,
    MARKERS,
    EventFormat,
)
from fullshard.formatting.plural import plural

_EPISODE = {EPISODE_START: "start of the episode", EPISODE_END: "end of the episode"}
Shown = tuple[str, int, int]
"""A picture in words, its first token and the token after its last."""


def passages(
    ids: Sequence[int], tokenizer: Any, form: EventFormat, screens: Sequence[Shown]
) -> Iterator[tuple[str, int]]:
    """What each event of a window says, and its number of tokens."""
    names = {tokenizer.convert_tokens_to_ids(marker): marker for marker in MARKERS}
    marks = [names.get(token, "") for token in ids]
    start, first = 0, None
    while start < len(ids):
        stop = _stop(marks, start)
        inside = [shown for shown in screens if start <= shown[1] < stop]
        text = _without(ids, start, stop, inside, lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False))
        if marks[start] in _EPISODE:
            yield _EPISODE[marks[start]], stop - start
        else:
            event = _event(text, form)
            first = event.timestamp_ns if event and first is None else first
            yield _said(event, inside, form, first or 0), stop - start
        start = stop


def _stop(marks: Sequence[str], start: int) -> int:
    """The token after the event, marker or other text that begins at `start`."""
    if marks[start] in _EPISODE:
        return start + 1
    wanted = {EVENT_END} if marks[start] == EVENT_START else {EVENT_START, *_EPISODE}
    found = next((at for at in range(start + 1, len(marks)) if marks[at] in wanted), len(marks))
    return min(found + (marks[start] == EVENT_START), len(marks))


def _without(
    ids: Sequence[int], start: int, stop: int, screens: Sequence[Shown], decode: Callable[[list[int]], str]
) -> str:
    """The text of some tokens without those of pictures."""
    covered = {at for _, first, last in screens for at in range(first, last)}
    return decode([int(ids[at]) for at in range(start, stop) if at not in covered])


def _event(text: str, form: EventFormat) -> Event | None:
    try:
        events = form.decode(text)
    except ValueError:
        return None
    return events[0] if events else None


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
