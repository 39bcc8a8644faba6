"""Replaces marks in a text and moves spans of characters along. Must not know what they mean."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[int, int]


def replaced(text: str, mark: str, texts: Sequence[str], spans: Sequence[Span]) -> tuple[str, list[Span], list[Span]]:
    """The text with its marks replaced one by one, the same spans in it, and the spans of the replacements."""
    pieces = text.split(mark)
    if len(pieces) != len(texts) + 1:
        raise ValueError(f"{len(pieces) - 1} marks for {len(texts)} replacements")
    out, starts, inserted = pieces[0], [(0, 0)], []
    read = len(pieces[0])
    for piece, new in zip(pieces[1:], texts, strict=True):
        inserted.append((len(out), len(out) + len(new)))
        out += new
        read += len(mark)
        starts.append((read, len(out)))
        out += piece
        read += len(piece)

    def moved(place: int) -> int:
        old, new = max((pair for pair in starts if pair[0] <= place), default=(0, 0))
        return new + place - old

    return out, [(moved(start), moved(stop)) for start, stop in spans], inserted


__all__ = ["replaced"]
