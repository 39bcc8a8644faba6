"""A few validation samples with their pictures, the expected answers and the generated ones: as a sheet and as a table.

Must not know ranks, files or how answers are generated.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fullshard.contracts.data import Features
from fullshard.families.vision.image_samples import stored_images
from fullshard.images.reading import read_again
from fullshard.multimodal.answers import last_answer

if TYPE_CHECKING:
    import torch
    from PIL import Image

_SIDE, _GAP, _TEXT, _LINE = 160, 12, 420, 20
"""Pixels of a picture's longer side, between parts, of the texts' width, and of a line's height."""
_MOST_PICTURES = 4
_MOST_CHARACTERS = 400
_INK, _RIGHT, _WRONG = (30, 30, 30), (20, 120, 40), (190, 40, 30)


@dataclass(frozen=True)
class Shown:
    """A sample as a person reads it."""

    pictures: list[Image.Image]
    question: str
    expected: str
    answer: str


def choose(stored: Any, number: int, image_token: int | None) -> list[Features]:
    """The first samples with an image before their last answer; without any, the first samples."""
    store = stored.store
    counts = store.sizes("image_sizes") if "image_sizes" in store.names else np.zeros(len(store), dtype=int)
    pictured = [int(at) for at in stored.chosen if counts[at]]
    found: list[Features] = []
    for at in pictured or [int(at) for at in stored.chosen[:number]]:
        sample = store[at]
        before, _ = last_answer(sample)
        if (sample["input_ids"][len(before["input_ids"]) :] != image_token).all():
            found.append(sample)
        if len(found) == number:
            break
    return found


def pictures_of(sample: Features, root: Path | None) -> list[Image.Image]:
    """The images of a sample."""
    stored = stored_images(sample) if "image_sizes" in sample else []
    return [read_again(data, is_file=is_file, root=root)[2] for data, is_file in stored]


def readable(tokens: Any, tokenizer: Any, image_token: int | None) -> str:
    """Tokens as one line of text, without those of images; of a long one the end."""
    text = tokenizer.decode([int(token) for token in tokens if token != image_token], skip_special_tokens=True)
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CHARACTERS else f"... {text[-_MOST_CHARACTERS:]}"


def table(shown: Sequence[Shown]) -> str:
    """Markdown, with a row for each sample."""
    rows = [
        [str(number), each.question, each.expected, each.answer, "yes" if each.answer == each.expected else "no"]
        for number, each in enumerate(shown, start=1)
    ]
    head = [["", "question", "expected", "answer", "right"], ["---"] * 5]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in [*head, *rows])


def sheet(shown: Sequence[Shown]) -> Image.Image:
    """A row for each sample: its pictures, and its texts beside them."""
    from PIL import Image, ImageDraw, ImageFont

    font, letters = ImageFont.load_default(size=15), _TEXT // 8
    columns = max(min(len(each.pictures), _MOST_PICTURES) for each in shown)
    texts = [_lines(number, each, letters) for number, each in enumerate(shown, start=1)]
    heights = [max(_SIDE, len(lines) * _LINE) for lines in texts]
    left = _GAP + columns * (_SIDE + _GAP)
    whole = Image.new("RGB", (left + _TEXT + _GAP, _GAP + sum(height + _GAP for height in heights)), "white")
    pen, top = ImageDraw.Draw(whole), _GAP
    for each, lines, height in zip(shown, texts, heights, strict=True):
        for place, picture in enumerate(each.pictures[:_MOST_PICTURES]):
            whole.paste(_scaled(picture), (_GAP + place * (_SIDE + _GAP), top))
        for line, (text, ink) in enumerate(lines):
            pen.text((left, top + line * _LINE), text, fill=ink, font=font)
        top += height + _GAP
    return whole


def pixels(image: Image.Image) -> torch.Tensor:
    """(1, 3, height, width) from -1 to 1."""
    import torch

    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 127.5 - 1


def _lines(number: int, shown: Shown, letters: int) -> list[tuple[str, tuple[int, int, int]]]:
    """The lines of a sample's texts, each with its colour."""
    ink = _RIGHT if shown.answer == shown.expected else _WRONG
    parts = [
        (f"{number}. {shown.question}", _INK),
        (f"expected: {shown.expected}", _INK),
        (f"answer: {shown.answer}", ink),
    ]
    return [(line, colour) for text, colour in parts for line in textwrap.wrap(text, letters) or [""]]


def _scaled(picture: Image.Image) -> Image.Image:
    """To the size of all pictures; small ones keep their pixels visible."""
    from PIL import Image

    scale = _SIDE / max(picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)


__all__ = ["Shown", "choose", "pictures_of", "pixels", "readable", "sheet", "table"]
