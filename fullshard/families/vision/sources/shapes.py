"""Drawn pictures with questions about the colour, shape and number of the shapes. Nothing is downloaded.

The number of a record determines its picture, so different ranges of numbers give different pictures. Must not know
tokens, batches or ranks.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from pydantic import Field

from fullshard.contracts.data import Records, Source
from fullshard.data.records import Listed, combine

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 205, 40)}
SHAPES = ("circle", "square", "triangle")
NUMBERS = ("one", "two", "three", "four")
_GRID = 2
"""Places for shapes along each side of a picture."""


class Shapes(Source):
    """Pictures (`images`) with one question and its answer (`messages`)."""

    records: int = Field(2000, ge=1)
    """How many."""
    start: int = Field(0, ge=0)
    """The number of the first: other ranges have other pictures."""
    side: int = Field(32, ge=16)
    """Pixels of a side."""

    def open(self) -> Records:
        numbers = range(self.start, self.start + self.records)
        return Listed(
            [_record(number, self.side) for number in numbers],
            where=lambda index: f"drawn shapes, number {numbers[index]}",
            fingerprint=lambda: combine("shapes", "2", str(self.start), str(self.records), str(self.side)),
        )


def _record(number: int, side: int) -> dict[str, Any]:
    draw = np.random.default_rng([number, 20])
    colour, shape = str(draw.choice(list(COLOURS))), str(draw.choice(SHAPES))
    count = int(draw.integers(1, _GRID**2 + 1))
    places = draw.choice(_GRID**2, size=count, replace=False)
    question, answer = [
        ("What colour are they?", colour),
        ("What shape are they?", shape),
        ("How many are there?", NUMBERS[count - 1]),
    ][int(draw.integers(3))]
    return {
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]},
            {"role": "assistant", "content": answer},
        ],
        "images": [drawn(colour, shape, [int(place) for place in places], side, draw)],
    }


def drawn(colour: str, shape: str, places: list[int], side: int, draw: np.random.Generator) -> bytes:
    """A PNG with the shape in some places of the grid, on paper of its own shade; sizes and tints vary."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (side, side), tuple(map(int, draw.integers(225, 256, 3))))
    pen, cell = ImageDraw.Draw(image), side // _GRID
    for place in places:
        left, top = place % _GRID * cell, place // _GRID * cell
        size = int(draw.integers(cell // 2, cell - 1))
        x, y = (int(edge + draw.integers(0, cell - size)) for edge in (left, top))
        box = (x, y, x + size, y + size)
        fill = tuple(int(value) for value in np.clip(COLOURS[colour] + draw.integers(-25, 26, 3), 0, 255))
        if shape == "circle":
            pen.ellipse(box, fill=fill)
        elif shape == "square":
            pen.rectangle(box, fill=fill)
        else:
            pen.polygon([(box[0], box[3]), (box[2], box[3]), ((box[0] + box[2]) // 2, box[1])], fill=fill)
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


__all__ = ["Shapes"]
