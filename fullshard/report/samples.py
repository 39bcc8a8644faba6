"""What a run has made: texts, pictures, images with answers, audio. Small enough to be part of the page.

A file counts only if it lies in the run folder. What does not fit is left out and named. Must not know HTML, nor what
the samples show.
"""

from __future__ import annotations

import base64
import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.formatting.readable import plain
from fullshard.report.folders import Run

BUDGET, TEXTS = 1_000_000, 200_000
"""Characters of media and of texts, for all runs of a page together."""
_WHOLE = 250_000
"""A picture with more bytes is made smaller."""
_SIDE, _LONGEST, _ROWS = 1200, 4_000, 60
_PICTURES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif"}
_SOUNDS = {".wav": "wav", ".mp3": "mpeg", ".ogg": "ogg", ".flac": "flac"}


@dataclass
class Room:
    """What is left for the samples of all runs."""

    media: int = BUDGET
    texts: int = TEXTS


@dataclass
class Sample:
    """What one step has made."""

    step: int
    name: str
    text: str = ""
    media: str = ""
    """A data URL."""
    is_sound: bool = False
    table: list[list[str]] = field(default_factory=list)
    """Answers to images: a row for each."""
    remark: str = ""


def samples(run: Run, room: Room) -> list[Sample]:
    """The samples of a run, newest first; older ones are left out when there is no room."""
    found, seen = list[Sample](), set[str]()
    files = [each["file"] for each in run.of_kind("event") if _is_media(each.get("file"))]
    for event in reversed(run.of_kind("event")):
        file, texts = event.get("file"), event.get("texts")
        if isinstance(file, str) and file not in seen:
            seen.add(file)
            found.append(_from_file(run.folder, file, event, room))
        elif event.get("event") == "texts" and isinstance(texts, list):
            said = [text for text in texts if isinstance(text, str) and not any(file in text for file in files)]
            found += [_from_text(event["step"], text, room) for text in said]
    return [sample for sample in found if sample.media or sample.text or sample.remark or sample.table]


def _is_media(file: Any) -> bool:
    return isinstance(file, str) and Path(file).suffix.lower() in (*_PICTURES, *_SOUNDS)


def _from_text(step: int, text: str, room: Room) -> Sample:
    title, _, body = plain(text).partition("\n")
    whole = body or title
    kept = whole[: min(_LONGEST, max(room.texts, 0))]
    room.texts -= len(kept)
    remark = f"{len(whole) - len(kept):,} more characters are in log.txt" if len(kept) < len(whole) else ""
    return Sample(step, title.rstrip(":")[:200] if body else "", text=_dedented(kept), remark=remark)


def _dedented(text: str) -> str:
    lines = text.split("\n")
    indent = min((len(line) - len(line.lstrip(" ")) for line in lines if line.strip()), default=0)
    return "\n".join(line[indent:] for line in lines)


def _from_file(folder: Path, file: str, event: dict[str, Any], room: Room) -> Sample:
    sample = Sample(event["step"], str(event.get("name", ""))[:200], remark=f"{file}: not shown")
    path, suffix = (folder / file).resolve(), Path(file).suffix.lower()
    if not path.is_relative_to(folder.resolve()) or not _is_media(file):
        return sample
    try:
        data, kind = (
            path.read_bytes(),
            f"audio/{_SOUNDS[suffix]}" if suffix in _SOUNDS else f"image/{_PICTURES[suffix]}",
        )
        if suffix in _PICTURES and len(data) > _WHOLE:
            data, kind, sample.remark = _smaller(data), "image/webp", f"{file}, made smaller"
        else:
            sample.remark = file
        sample.table = _answers(path.with_suffix(".md"))
    except Exception as error:  # whatever a picture's decoder raises
        sample.remark = f"{file}: not shown ({type(error).__name__})"
        return sample
    address = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    if len(address) > room.media:
        sample.remark = f"{file}: not shown, since the page would become too large"
        return sample
    room.media -= len(address)
    sample.media, sample.is_sound = address, suffix in _SOUNDS
    return sample


def _smaller(data: bytes) -> bytes:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as picture:
        picture.thumbnail((_SIDE, _SIDE))
        out = io.BytesIO()
        picture.convert("RGB").save(out, "WEBP", quality=80)
    return out.getvalue()


def _answers(path: Path) -> list[list[str]]:
    """The table beside a picture, if it has one: Markdown, with a head."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[: _ROWS + 2]
    rows = [[cell.strip().replace("\\|", "|")[:500] for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in rows if row and not all(re.fullmatch(r":?-+:?", cell) for cell in row)]
