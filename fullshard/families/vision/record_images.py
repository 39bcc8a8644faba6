"""The images of a record, in the order of its conversation, and the conversation with a mark for each.

An image is in a part of a message, or in the column `images` (or `image`); a text may mark its place with `<image>`.
Must not know templates, tokens or ranks.
"""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote_to_bytes
from urllib.request import Request, urlopen

from fullshard.config.problems import sort_of
from fullshard.contracts.data import Record
from fullshard.errors import DataError
from fullshard.images.reading import Given, Unreadable, given
from fullshard.multimodal.parts import Medium

MARK = "<image>"
"""The place of an image in a text, as in LLaVA's data."""
COLUMNS = ("images", "image")
MOST_BYTES = 100 * 2**20
"""The largest image that is downloaded."""
WAIT_S, MOST_S = 20.0, 120.0
"""How long a server may be silent, and how long a whole download may take."""
MEDIUM = Medium(
    "image", "image", MARK, ("image", "image_url"), ("image", "image_url", "url", "path", "bytes", "base64")
)
text_only, part_images, place_images = MEDIUM.text_only, MEDIUM.in_parts, MEDIUM.place


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
        cause: object = error
        if isinstance(error, HTTPError):
            error.close()  # it holds the connection
        elif isinstance(error, URLError):
            cause = getattr(error.reason, "strerror", None) or error.reason
        reason = str(cause).rstrip(".") or type(error).__name__
        raise Unreadable(f"{where} cannot be downloaded from {_short(url)}: {reason}. {fix}") from error
    return bytes(found)


def _short(url: str) -> str:
    return url if len(url) <= 200 else f"{url[:197]}..."


__all__ = ["MARK", "column_images", "image_columns", "part_images", "place_images", "read_given", "text_only"]
