"""Events as JSON between `<EVENT_START>` and `<EVENT_END>`: long, but nothing is rounded.

    <EVENT_START>{"message_type":"KeyboardEvent","timestamp_ns":1250,"message":{"event_type":"press","vk":65}}<EVENT_END>

Must not know rows' columns, windows or tokenizers.
"""

from __future__ import annotations

import json
from dataclasses import replace

from fullshard.errors import DataError
from fullshard.families.vision.desktop.events import Event, Screen
from fullshard.families.vision.desktop.rows import event as read_event
from fullshard.families.vision.desktop.rows import message_of, whole
from fullshard.families.vision.desktop.token_format import EVENT_END, EVENT_START, MARKERS, bodies


class JsonEvents:
    """Plain text that any tokenizer can encode; can hold the state of windows too."""

    clock_ns = 2**63

    def vocabulary(self) -> list[str]:
        return list(MARKERS)

    def takes(self, event: Event) -> bool:
        return True

    def rounded(self, event: Event) -> list[Event]:
        return [replace(event, image=None) if isinstance(event, Screen) else event]

    def encode(self, event: Event) -> str:
        kind, message = message_of(event)
        content = {"message_type": kind, "timestamp_ns": event.timestamp_ns, "message": message}
        if isinstance(event, Screen):
            del content["message"]
        # Without a "<" no text of the user can be read as a special token.
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
        return f"{EVENT_START}{text}{EVENT_END}"

    def decode(self, text: str) -> list[Event]:
        return [_event(body) for body in bodies(text)]


def _event(body: str) -> Event:
    """Raises ValueError, also for what is JSON but not an event."""
    try:
        content, end = json.JSONDecoder().raw_decode(body)
        time, kind = whole(content, "timestamp_ns"), content["message_type"]
        if kind == "ScreenCaptured":
            return Screen(time)
        if body[end:]:
            raise ValueError(f"{body[end:][:60]!r} is too much")
        return read_event(kind, content["message"], time)
    except (DataError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an event: {body[:60]!r} ({error})") from error
