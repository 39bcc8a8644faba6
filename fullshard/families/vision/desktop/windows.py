"""Cuts episodes into windows: as many whole events as fit, in chronological order, never from two episodes.

A window is a list of segments: text with event tokens, and screens. Lengths come from the caller. Must not know
tokenizers, image processors or files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from fullshard.families.vision.desktop.episodes import Episode
from fullshard.families.vision.desktop.events import Action, Event, ImageRef, Info, Mouse, RawMouse, Screen
from fullshard.families.vision.desktop.token_format import (
    EPISODE_END,
    EPISODE_START,
    EVENT_END,
    EventFormat,
)

TOO_LONG = "events too long for a window"
NO_IMAGE = "without a screen"
ROUNDED = "turns of the wheel that are rounded to whole notches"
LEFT_OUT = "{} messages that are left out"


@dataclass(frozen=True)
class Text:
    """Text to tokenize, with event tokens in it."""

    text: str
    trained: bool
    event: Event | None
    """The event it encodes; None for the start and the end of an episode."""


@dataclass(frozen=True)
class Image:
    """A picture between texts."""

    ref: ImageRef
    tokens: int
    event: Screen


Segment = Text | Image


@dataclass(frozen=True)
class Window:
    """A part of one episode."""

    episode_path: str
    segments: list[Segment]
    tokens: int

    @property
    def images(self) -> list[ImageRef]:
        return [segment.ref for segment in self.segments if isinstance(segment, Image)]

    @property
    def learned(self) -> bool:
        """Whether it has an action to train on."""
        return any(isinstance(segment, Text) and segment.trained for segment in self.segments)


@dataclass
class Cut:
    """The windows of an episode, and what they leave out."""

    windows: list[Window] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    """Events that were skipped or rounded, by what they are."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Windows that were skipped, by reason."""


def cut(
    episode: Episode,
    form: EventFormat,
    *,
    length: int,
    count_tokens: Callable[[str], int],
    image_tokens: Callable[[ImageRef], int],
    without_image: Literal["keep", "skip"] = "skip",
    action_shift_ns: int = 0,
    use_info: bool = False,
) -> Cut:
    """Cuts an episode into windows of at most `length` tokens.

    `action_shift_ns` is added to the time of every action before events are sorted: a positive shift lets the model see
    later screens before an action. `use_info` includes the state of windows, if the format can encode it."""
    done, open_segments, tokens = Cut(), list[Segment](), 0

    def close() -> None:
        nonlocal open_segments, tokens
        window = Window(episode.path, open_segments, tokens)
        if not any(segment.event for segment in open_segments):
            pass  # only the start or the end of an episode
        elif without_image == "skip" and not window.images:
            done.skipped[NO_IMAGE] += 1
        else:
            done.windows.append(window)
        open_segments, tokens = [], 0

    for segments in _written(episode, form, image_tokens, action_shift_ns, use_info, done.events):
        size = sum(one.tokens if isinstance(one, Image) else count_tokens(one.text) for one in segments)
        if size > length:
            done.events[TOO_LONG] += 1
            continue
        if tokens + size > length:
            close()
        open_segments += segments
        tokens += size
    close()
    done.events = +done.events  # without zeros
    return done


def _written(
    episode: Episode,
    form: EventFormat,
    image_tokens: Callable[[ImageRef], int],
    shift_ns: int,
    use_info: bool,
    counts: Counter[str],
) -> Iterator[list[Segment]]:
    """The segments of each event; a window never splits them."""
    yield [Text(EPISODE_START, trained=False, event=None)]
    for event in _chosen(_shifted(episode.events, shift_ns), form, use_info, counts):
        text = form.encode(event)
        if isinstance(event, RawMouse) and event.wheel:
            turned = sum(one.wheel for one in form.rounded(event) if isinstance(one, RawMouse))
            counts[ROUNDED] += turned != event.wheel
        if isinstance(event, Screen) and event.image is not None:
            before = Text(text.removesuffix(EVENT_END), trained=False, event=event)
            image = Image(event.image, image_tokens(event.image), event)
            yield [before, image, Text(EVENT_END, trained=False, event=event)]
        else:
            yield [Text(text, isinstance(event, Action), event)]
    yield [Text(EPISODE_END, trained=False, event=None)]


def _shifted(events: Sequence[Event], shift_ns: int) -> Sequence[Event]:
    if not shift_ns:
        return events
    moved = [
        replace(one, timestamp_ns=one.timestamp_ns + shift_ns) if isinstance(one, Action) else one for one in events
    ]
    # At the same time a screen comes first: it is what the action answers.
    return sorted(moved, key=lambda one: (one.timestamp_ns, isinstance(one, Action)))


def _chosen(events: Sequence[Event], form: EventFormat, use_info: bool, counts: Counter[str]) -> Iterator[Event]:
    """Leaves out what the format cannot encode, and pointer events if the same movement is recorded as raw events."""
    has_raw = any(isinstance(event, RawMouse) for event in events)
    for event in events:
        if isinstance(event, Info) and not (use_info and form.takes(event)):
            counts[LEFT_OUT.format(event.message_type)] += 1
        elif isinstance(event, Mouse) and has_raw:
            counts[f"{LEFT_OUT.format('MouseEvent')}: RawMouseEvent says the same"] += 1
        else:
            yield event
