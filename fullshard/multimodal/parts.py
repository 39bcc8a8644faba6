"""Images, clips and other media in the messages of a conversation: which there are, and a part for each in its place.

A medium is in a part of a message, or in a column of the record; a text may mark its place. Must not know how media are
read, templates, tokens or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.errors import DataError
from fullshard.formatting.plural import counted

Message = dict[str, Any]


@dataclass(frozen=True)
class Medium:
    """How records write one kind of medium."""

    name: str
    """The type of its parts for chat templates: image."""
    noun: str
    """What one is called in error messages."""
    mark: str
    """Its place in a text: <image>."""
    types: tuple[str, ...]
    """Types of parts in records."""
    values: tuple[str, ...]
    """Keys of a part that hold it."""
    whole: bool = False
    """Whether a part without any of these keys but with others holds it itself."""

    def text_only(self, value: Any) -> Any:
        """A conversation whose parts of this medium are replaced by marks, so that it can be read as text."""
        if not isinstance(value, Sequence) or isinstance(value, str):
            return value
        return [self._marked(message) for message in value]

    def _marked(self, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return message
        contents = {key: message[key] for key in ("content", "value") if isinstance(message.get(key), list)}
        return {**message, **{key: [self._as_text(part) for part in parts] for key, parts in contents.items()}}

    def _as_text(self, part: Any) -> Any:
        return {"type": "text", "text": self.mark} if self._is_part(part) else part

    def _is_part(self, part: Any) -> bool:
        if not isinstance(part, Mapping):
            return False
        return part.get("type") in self.types or ("type" not in part and part.get(self.name) is not None)

    def in_parts(self, value: Any) -> list[Any]:
        """What each part of this medium in a conversation holds; None for a part that only marks a place."""
        if not isinstance(value, Sequence) or isinstance(value, str):
            return []
        contents = [m.get("content", m.get("value")) for m in value if isinstance(m, Mapping)]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        return [self._held(part) for part in parts if self._is_part(part)]

    def _held(self, part: Mapping[str, Any]) -> Any:
        key = next((key for key in self.values if part.get(key) is not None), "")
        value = f"data:;base64,{part[key]}" if key == "base64" else part.get(key)
        if value is None and self.whole:
            rest = {key: value for key, value in part.items() if key != "type" and value is not None}
            return rest or None
        return value.get("url") if isinstance(value, Mapping) and "url" in value else value

    def place(self, messages: list[Message], in_parts: list[Any], in_column: list[Any]) -> list[Any]:
        """Splits the texts of messages at their marks into parts, in place; returns the media in order."""
        name = self.noun
        if any(value is not None for value in in_parts) and in_column:
            raise DataError(
                f"the record has {name}s in its messages and in a column as well. Keep them in one place: parts "
                f"without their own {name} take the column's, in order."
            )
        held = [value for value in in_parts if value is not None]
        if held and len(held) < len(in_parts):
            raise DataError(f"{counted(len(in_parts) - len(held), f'{name} part')} of the messages have no {name}.")
        found = held or in_column
        marks = sum(text.count(self.mark) for message in messages for text in _texts(message))
        if found and not marks:
            # Without a mark, media come before the first question.
            first = next((message for message in messages if message["role"] == "user"), messages[0])
            first["content"] = [{"type": self.name}] * len(found) + _parts(first.get("content"))
        else:
            self.check_places(marks, found)
        for message in messages:
            if any(self.mark in text for text in _texts(message)):
                message["content"] = [piece for part in _parts(message["content"]) for piece in self._split(part)]
        return found

    def check_places(self, marks: int, found: Sequence[Any]) -> None:
        """Raises unless there is one of the medium for each place."""
        if marks != len(found):
            raise DataError(
                f"the conversation has {counted(marks, 'place')} for {self.noun}s ({self.mark} or {self.name} parts) "
                f"and {counted(len(found), self.noun)}. Give one {self.noun} for each place, in order."
            )

    def _split(self, part: dict[str, Any]) -> list[dict[str, Any]]:
        if self.mark not in part.get("text", ""):
            return [part]
        pieces: list[dict[str, Any]] = []
        for at, text in enumerate(part["text"].split(self.mark)):
            pieces += [{"type": self.name}] if at else []
            # LLaVA writes a line break after the mark, which the chat template writes itself.
            text = text.removeprefix("\n") if at else text
            pieces += [{**part, "text": text}] if text else []
        return pieces


def _texts(message: Message) -> list[str]:
    return [str(part["text"]) for part in _parts(message.get("content")) if "text" in part]


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [part for part in content or [] if isinstance(part, dict)]


__all__ = ["Medium"]
