"""The images of a record, in the order of its conversation, and the conversation with a mark for each.

An image is in a part of a message, or in the column `images` (or `image`); a text may mark its place with `<image>`.
Must not know templates, tokens or ranks.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes
from urllib.request import urlopen

from fullshard.config.problems import sort_of
from fullshard.contracts.data import Record
from fullshard.errors import DataError
from fullshard.formatting.plural import counted
from fullshard.images.reading import Given, given

MARK = "<image>"
"""The place of an image in a text, as in LLaVA's data."""
COLUMNS = ("images", "image")
_VALUES = ("image", "image_url", "url", "path", "bytes", "base64")
"""Keys of an image part that hold the image."""

Message = dict[str, Any]


def image_columns(record: Record) -> list[str]:
    """The columns with images."""
    return [key for key in COLUMNS if record.get(key) is not None]


def column_images(record: Record) -> list[Any]:
    """The images of the record's own column, in order."""
    columns = image_columns(record)
    if len(columns) > 1:
        raise DataError(f"the record has both {' and '.join(map(repr, columns))}. Keep one of them.")
    if not columns:
        return []
    value = record[columns[0]]
    return list(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else [value]


def text_only(value: Any) -> Any:
    """A conversation whose image parts are replaced by marks, so that it can be read as text."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return value
    return [_marked(message) for message in value]


def _marked(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    contents = {key: message[key] for key in ("content", "value") if isinstance(message.get(key), list)}
    return {**message, **{key: [_as_text(part) for part in parts] for key, parts in contents.items()}}


def _as_text(part: Any) -> Any:
    return {"type": "text", "text": MARK} if _is_image(part) else part


def _is_image(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    return part.get("type") in ("image", "image_url") or ("type" not in part and part.get("image") is not None)


def part_images(value: Any) -> list[Any]:
    """What each image part of a conversation holds; None for a part that only marks a place."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return []
    contents = [m.get("content", m.get("value")) for m in value if isinstance(m, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [_held(part) for part in parts if _is_image(part)]


def _held(part: Mapping[str, Any]) -> Any:
    value = next((part[key] for key in _VALUES if part.get(key) is not None), None)
    return value.get("url") if isinstance(value, Mapping) and "url" in value else value


def place_images(messages: list[Message], in_parts: list[Any], in_column: list[Any]) -> list[Any]:
    """Splits the texts of messages at their marks into parts, in place; returns the images in order."""
    if any(value is not None for value in in_parts) and in_column:
        raise DataError(
            "the record has images in its messages and in a column as well. Keep them in one place: parts without an "
            "image of their own take the column's, in order."
        )
    held = [value for value in in_parts if value is not None]
    if held and len(held) < len(in_parts):
        raise DataError(f"{counted(len(in_parts) - len(held), 'image part')} of the messages have no image.")
    images = held or in_column
    marks = sum(text.count(MARK) for message in messages for text in _texts(message))
    if images and not marks:
        # Without a mark, images come before the first question.
        first = next((message for message in messages if message["role"] == "user"), messages[0])
        first["content"] = [{"type": "image"}] * len(images) + _parts(first.get("content"))
    elif marks != len(images):
        raise DataError(
            f"the conversation has {counted(marks, 'place')} for images ({MARK} or image parts) and "
            f"{counted(len(images), 'image')}. Give one image for each place, in order."
        )
    for message in messages:
        if any(MARK in text for text in _texts(message)):
            message["content"] = [piece for part in _parts(message["content"]) for piece in _split(part)]
    return images


def _texts(message: Message) -> list[str]:
    return [str(part["text"]) for part in _parts(message.get("content")) if "text" in part]


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [part for part in content or [] if isinstance(part, dict)]


def _split(part: dict[str, Any]) -> list[dict[str, Any]]:
    if MARK not in part.get("text", ""):
        return [part]
    pieces: list[dict[str, Any]] = []
    for at, text in enumerate(part["text"].split(MARK)):
        pieces += [{"type": "image"}] if at else []
        # LLaVA writes a line break after the mark, which the chat template writes itself.
        text = text.removeprefix("\n") if at else text
        pieces += [{**part, "text": text}] if text else []
    return pieces


def read_given(value: Any, number: int, *, allow_urls: bool) -> Given:
    """One image as it can be read: data URIs become bytes, and URLs too where they are allowed."""
    where = f"image {number}"
    if isinstance(value, str) and value.startswith("data:"):
        return Given(_data_uri(value, where), where)
    if isinstance(value, str) and re.match(r"https?://", value):
        if not allow_urls:
            raise DataError(
                f"{where} is a URL ({value[:80]}), and nothing is downloaded unless you say so. Download it and give a "
                "path, or set data.encode.allow_urls: true."
            )
        return Given(_download(value, where), where)
    if isinstance(value, str) and value.startswith("file://"):
        value = value.removeprefix("file://")
    found = given(value, where)
    if found is None:
        raise DataError(f"{where} is empty, found {sort_of(value)}. Give a path, bytes or a data URI.")
    return found


def _data_uri(value: str, where: str) -> bytes:
    head, _, data = value.partition(",")
    try:
        return base64.b64decode(data, validate=True) if head.endswith(";base64") else unquote_to_bytes(data)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{where} is a data URI whose base64 cannot be decoded ({error}). Encode it again.") from error


def _download(url: str, where: str) -> bytes:
    try:
        with urlopen(url, timeout=60) as answer:  # noqa: S310  (http or https, and the user allowed it)
            return bytes(answer.read())
    except OSError as error:
        raise DataError(f"{where} cannot be downloaded from {url[:80]}: {error}.") from error


__all__ = ["MARK", "column_images", "image_columns", "part_images", "place_images", "read_given", "text_only"]
