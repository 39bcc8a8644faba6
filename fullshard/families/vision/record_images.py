"""The images of a record, in the order of its conversation, and the conversation with a mark for each.

An image is in a part of a message, or in the column `images` (or `image`); a text may mark its place with `<image>`.
Must not know templates, tokens or ranks.
"""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import unquote_to_bytes
from urllib.request import Request, urlopen

from fullshard.config.problems import sort_of
from fullshard.contracts.data import Record
from fullshard.errors import DataError
from fullshard.formatting.plural import counted
from fullshard.images.reading import Given, Unreadable, given

MARK = "<image>"
"""The place of an image in a text, as in LLaVA's data."""
COLUMNS = ("images", "image")
MOST_BYTES = 100 * 2**20
"""The largest image that is downloaded."""
WAIT_S, MOST_S = 20.0, 120.0
"""How long a server may be silent, and how long a whole download may take."""
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
                f"{where} is a URL ({_short(value)}), and nothing is downloaded unless you allow it. Download it and "
                "give a path, or set data.encode.allow_urls: true."
            )
        return Given(_download(value, where), f"{where}, {_short(value)}")
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
    """The content of a URL, within limits of time and size."""
    fix = "Download it and give a path, or set data.encode.unreadable = skip to leave such records out."
    deadline, found = time.monotonic() + MOST_S, bytearray()
    try:
        # Some servers refuse Python's own name.
        request = Request(url, headers={"User-Agent": "fullshard"})  # noqa: S310  (http or https)
        with urlopen(request, timeout=WAIT_S) as answer:  # noqa: S310  (the user allowed it)
            while piece := answer.read1(2**16):
                found += piece
                if len(found) > MOST_BYTES:
                    raise OSError(f"it has more than {MOST_BYTES / 2**20:g} MiB")
                if time.monotonic() > deadline:
                    raise OSError(f"it takes more than {MOST_S:g} s")
            if answer.length:
                raise OSError(f"the connection ended {answer.length:,} bytes before the end")
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, HTTPError):
            error.close()  # it holds the connection
        reason = str(error).rstrip(".") or type(error).__name__
        raise Unreadable(f"{where} cannot be downloaded from {_short(url)}: {reason}. {fix}") from error
    return bytes(found)


def _short(url: str) -> str:
    return url if len(url) <= 200 else f"{url[:197]}..."


__all__ = ["MARK", "column_images", "image_columns", "part_images", "place_images", "read_given", "text_only"]
