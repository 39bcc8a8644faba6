"""The meaning of an action, to score predictions: the key, the button, the direction of movement or of the wheel.

Must not know models, windows or files.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fullshard.families.vision.desktop.events import SIDE_WHEEL, Event, Key, Mouse, RawMouse, buttons_of, key_name
from fullshard.families.vision.desktop.token_format import EventFormat

ActionType = Literal["key", "button", "movement", "scroll"]
DIRECTIONS = ("right", "down right", "down", "down left", "left", "up left", "up", "up right")
"""The eight sectors, clockwise on the screen, where y grows downwards."""
ALL = "all"


@dataclass(frozen=True)
class Meaning:
    """What an action does: `key`, `A down`; `movement`, `up left`."""

    type: ActionType
    value: str


@dataclass(frozen=True)
class Score:
    """Correct predictions out of all."""

    correct: int
    total: int

    @property
    def share(self) -> float:
        return self.correct / self.total


def direction(dx: int, dy: int) -> str:
    """One of eight sectors of 45 degrees, or `still`."""
    return DIRECTIONS[round(math.atan2(dy, dx) / (math.pi / 4)) % 8] if dx or dy else "still"


def meanings(events: Iterable[Event]) -> list[Meaning | None]:
    """The meaning of each event in a sequence. None: not an action, or a pointer whose last position is unknown."""
    found, last = list[Meaning | None](), None
    for event in events:
        found.append(_meaning(event, last))
        last = event if isinstance(event, Mouse) else last
    return found


def _meaning(event: Event, last: Mouse | None) -> Meaning | None:
    match event:
        case Key():
            return Meaning("key", f"{key_name(event.key)} {_down(event.pressed)}")
        case RawMouse() if buttons := buttons_of(event.flags):
            return Meaning("button", ", ".join(f"{name} {_down(pressed)}" for name, pressed in buttons))
        case RawMouse() if event.wheel:
            ways = ("left", "right") if event.flags & SIDE_WHEEL else ("down", "up")
            return Meaning("scroll", ways[event.wheel > 0])
        case RawMouse():
            return Meaning("movement", direction(event.dx, event.dy))
        case Mouse(action="click"):
            return Meaning("button", f"{event.button} {_down(bool(event.pressed))}")
        case Mouse(action="scroll"):
            return Meaning("scroll", direction(event.dx, -event.dy))
        case Mouse() if last is not None:
            return Meaning("movement", direction(event.x - last.x, event.y - last.y))
    return None


def _down(pressed: bool) -> str:
    return "down" if pressed else "up"


def meaning_of_text(text: str, form: EventFormat, *, last: Mouse | None = None) -> Meaning | None:
    """The meaning of the first event in a text, after the pointer event `last`. None: not an action; a model may
    write anything."""
    event = _first(text, form)
    return _meaning(event, last) if event else None


def pointer_in(text: str, form: EventFormat) -> Mouse | None:
    """The first event of a text, if it says where the pointer is."""
    event = _first(text, form)
    return event if isinstance(event, Mouse) else None


def _first(text: str, form: EventFormat) -> Event | None:
    try:
        return next(iter(form.decode(text)), None)
    except ValueError:
        return None


def accuracy(expected: Sequence[Meaning | None], predicted: Sequence[Meaning | None]) -> dict[str, Score]:
    """Correct predictions for each expected type, and for all."""
    counts: dict[str, list[bool]] = defaultdict(list)
    for wanted, got in zip(expected, predicted, strict=True):
        if wanted is not None:
            counts[wanted.type].append(wanted == got)
            counts[ALL].append(wanted == got)
    return {name: Score(sum(right), len(right)) for name, right in counts.items()}


def baseline(expected: Sequence[Meaning | None], seen: Sequence[Meaning | None]) -> dict[str, Score]:
    """The score of always predicting the most frequent action in `seen`.

    For a type it is the most frequent action of that type, as if the type were known."""
    known = [one for one in seen if one is not None]
    guesses = dict.fromkeys((one.type for one in known), None) | {ALL: None}
    best = {name: Counter(one for one in known if name in (ALL, one.type)).most_common(1) for name in guesses}
    wanted = [one for one in expected if one is not None]
    scores = {}
    for name in {one.type: None for one in wanted} | ({ALL: None} if wanted else {}):
        of_type = [one for one in wanted if name in (ALL, one.type)]
        guess = best[name][0][0] if best.get(name) else None
        scores[name] = Score(sum(one == guess for one in of_type), len(of_type))
    return scores
