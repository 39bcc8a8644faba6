"""Tokens back to events: where each event of a window begins and ends, and what it says.

Works on tokens alone, also on windows that were tokenised elsewhere. Must not know files or the layout of samples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fullshard.errors import DataError
from fullshard.families.vision.desktop.events import Action, Event
from fullshard.families.vision.desktop.token_format import (
    EPISODE_END,
    EPISODE_START,
    EVENT_END,
    EVENT_START,
    MARKERS,
    EventFormat,
)

_OF_EPISODE = (EPISODE_START, EPISODE_END)


@dataclass(frozen=True)
class Span:
    """Tokens from `start` up to `stop`: a whole event, a marker of an episode, or anything else."""

    start: int
    stop: int
    text: str
    """Without the tokens of pictures."""
    event: Event | None
    """None: it is not a whole event of the format."""

    @property
    def marker(self) -> str | None:
        return self.text if self.text in _OF_EPISODE else None


def spans(ids: Sequence[int], tokenizer: Any, form: EventFormat, *, pictures: Collection[int] = ()) -> Iterator[Span]:
    """The window in parts; `pictures` are the positions of tokens that belong to pictures."""
    names = {tokenizer.convert_tokens_to_ids(marker): marker for marker in MARKERS}
    marks = [names.get(int(token), "") for token in ids]
    start = 0
    while start < len(ids):
        stop = _stop(marks, start)
        kept = [int(ids[at]) for at in range(start, stop) if at not in pictures]
        text = tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        yield Span(start, stop, text, _event(text, form))
        start = stop


def learned(ids: Sequence[int], tokenizer: Any, form: EventFormat, *, pictures: Collection[int]) -> np.ndarray:
    """Which tokens of a finished window are learned: those of actions, from the start to the end of each event."""
    found = np.zeros(len(ids), dtype=bool)
    for span in spans(ids, tokenizer, form, pictures=pictures):
        found[span.start : span.stop] = isinstance(span.event, Action)
        whole = span.text.startswith(EVENT_START) and span.text.endswith(EVENT_END)
        if whole and span.event is None:
            raise DataError(
                f"'input_ids' has an event that this format does not know: {span.text[:100]!r}. Set data.encode.format "
                "to the format that the rows were made with."
            )
    return found


def _stop(marks: Sequence[str], start: int) -> int:
    """The token after the event, marker or other text that begins at `start`."""
    if marks[start] in _OF_EPISODE:
        return start + 1
    wanted = {EVENT_END} if marks[start] == EVENT_START else {EVENT_START, *_OF_EPISODE}
    found = next((at for at in range(start + 1, len(marks)) if marks[at] in wanted), len(marks))
    return min(found + (marks[start] == EVENT_START), len(marks))


def _event(text: str, form: EventFormat) -> Event | None:
    try:
        events = form.decode(text)
    except ValueError:
        return None
    return events[0] if events else None
