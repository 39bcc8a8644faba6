"""A picture of the memory of one rank over one step: in characters for a terminal, and as an SVG file.

Must not know what the moments mean or how they are predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from html import escape
from itertools import pairwise

from fullshard.formatting.readable import size
from fullshard.plan.moments import Memory, Moment, peak

WIDTH, HEIGHT = 60, 12
GROUPS = {
    "held": (("parameters", "optimizer", "ema", "buffers", "gradients"), "░"),
    "activations": (("activations",), "▒"),
    "short-lived (gathered units, reductions, working)": (("gathered", "reduced", "working"), "█"),
}
PLAIN = str.maketrans({"░": ".", "▒": ":", "█": "#"})
"""For a terminal that shows no more than ASCII."""
COLOURS = {
    "parameters": "#4477aa",
    "optimizer": "#66ccee",
    "ema": "#228833",
    "buffers": "#888888",
    "gradients": "#ccbb44",
    "activations": "#ee6677",
    "gathered": "#aa3377",
    "reduced": "#ee9944",
    "working": "#bbbbbb",
}


def in_characters(moments: Sequence[Moment], limit: float | None) -> list[str]:
    """Lines of text, the fullest moment of each column; a dashed line is what the device has, if it is near."""
    columns = _columns(moments, WIDTH)
    highest = max(column.total for column in columns)
    top = max(highest, limit) if limit and limit < 1.6 * highest else highest
    lines = []
    for level in range(HEIGHT, 0, -1):
        floor = (level - 0.5) / HEIGHT * top
        row = "".join(_shade(column, floor) for column in columns)
        if limit and top >= limit and (level - 1) / HEIGHT * top < limit <= level / HEIGHT * top:
            row = "".join(mark if mark != " " else "-" for mark in row)
        label = size(level / HEIGHT * top) if level in (HEIGHT, HEIGHT // 2) else ""
        lines.append(f"{label:>10} |{row}")
    lines.append(f"{'0':>10} +{'-' * len(columns)}")
    lines.append(f"{'':>11} {_phases(moments, len(columns))}")
    lines.append("  " + "   ".join(f"{mark} {name}" for name, (_, mark) in GROUPS.items()))
    return lines


def _columns(moments: Sequence[Moment], width: int) -> list[Memory]:
    """The fullest of the moments of each column; a moment may fill several."""
    edges = [i * len(moments) / width for i in range(width + 1)]
    return [peak(moments[int(begin) : max(int(begin) + 1, int(end))]).memory for begin, end in pairwise(edges)]


def _shade(column: Memory, floor: float) -> str:
    height = 0.0
    for kinds, mark in GROUPS.values():
        height += sum(getattr(column, kind) for kind in kinds)
        if height > floor:
            return mark
    return " "


def _phases(moments: Sequence[Moment], width: int) -> str:
    """Names of the phases, where they begin."""
    line = [" "] * (width + 8)
    for name in ("forward", "backward", "update"):
        first = next((i for i, moment in enumerate(moments) if moment.name.startswith(name)), None)
        if first is not None:
            start = min(int(first * width / len(moments)), width - 1)
            for offset, letter in enumerate(f"|{name}"):
                if start + offset < len(line):
                    line[start + offset] = letter
    return "".join(line).rstrip()


def as_svg(moments: Sequence[Moment], limit: float | None, *, title: str) -> str:
    """A stacked area for every kind, one point for every moment, with the peak marked. Works without a network."""
    wide, high, left, top = 960, 420, 90, 50
    most = max(max(moment.memory.total for moment in moments), (limit or 0)) * 1.05
    step = wide / max(len(moments) - 1, 1)
    kinds = [field.name for field in fields(Memory) if any(getattr(m.memory, field.name) for m in moments)]

    def point(index: int, amount: float) -> str:
        return f"{left + index * step:.1f},{top + high - amount / most * high:.1f}"

    below, areas = [0.0] * len(moments), []
    for kind in kinds:
        above = [base + getattr(m.memory, kind) for base, m in zip(below, moments, strict=True)]
        ring = [point(i, v) for i, v in enumerate(above)] + [point(i, v) for i, v in reversed(list(enumerate(below)))]
        areas.append(f'<polygon points="{" ".join(ring)}" fill="{COLOURS[kind]}"><title>{kind}</title></polygon>')
        below = above
    highest = peak(moments)
    at = list(moments).index(highest)
    x, y = point(at, highest.memory.total).split(",")
    marks = [f'<circle cx="{x}" cy="{y}" r="5" fill="black"/>']
    side = "end" if at > len(moments) / 2 else "start"
    text = f"peak {size(highest.memory.total)}: {highest.name}"
    marks.append(f'<text x="{x}" y="{float(y) - 10:.1f}" text-anchor="{side}">{escape(text)}</text>')
    if limit:
        line = point(0, limit).split(",")[1]
        marks.append(
            f'<line x1="{left}" x2="{left + wide}" y1="{line}" y2="{line}" stroke="black" stroke-dasharray="6 4"/>'
            f'<text x="{left + 4}" y="{float(line) - 6:.1f}">{size(limit)}</text>'
        )
    legend = [
        f'<rect x="{left + i * 105}" y="{top + high + 45}" width="12" height="12" fill="{COLOURS[kind]}"/>'
        f'<text x="{left + 16 + i * 105}" y="{top + high + 56}">{kind}</text>'
        for i, kind in enumerate(kinds)
    ]
    ticks = [
        f'<text x="{left - 8}" y="{top + high - share * high + 4:.1f}" text-anchor="end">{size(share * most)}</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    phases = [
        f'<text x="{left + first * step:.1f}" y="{top + high + 20}" text-anchor="{anchor}">{name}</text>'
        for name, anchor in (("forward", "start"), ("backward", "start"), ("update", "end"))
        if (first := next((i for i, m in enumerate(moments) if m.name.startswith(name)), None)) is not None
    ]
    head = f'<text x="{left}" y="24" font-size="16">{escape(title)}</text>'
    body = "\n".join([head, *areas, *marks, *ticks, *phases, *legend])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide + left + 60} {high + top + 80}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
