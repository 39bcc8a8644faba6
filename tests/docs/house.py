"""Draws docs/images/house.svg from the layers that tests/arch enforces: python -m tests.docs.house"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from tests.arch.package import SERVING
from tests.arch.test_layers import LAYERS
from tests.docs.pages import ROOT

PICTURE = ROOT / "docs" / "images" / "house.svg"


@dataclass(frozen=True)
class Floor:
    title: str
    about: str
    rows: tuple[str, ...]
    """The first layer of each row of rooms. A row goes on until the next one begins."""


FLOORS = (
    Floor("Foundation", "imports no torch", ("errors",)),
    Floor("Machine", "ranks, files, console", ("kernels",)),
    Floor("Parts", "data, losses, optimizers, sinks", ("images",)),
    Floor("One step", "and what families share", ("proofs",)),
    Floor("The run", "what happens, and when", ("recipe",)),
    Floor("Composition and tools", "put together, checked, proven, explained", ("commands", "plan")),
    Floor("Families", "one folder each in fullshard/families", ("families",)),
)
"""From the ground up. Above them is the roof."""
ROOF = ("cli", "__main__")

CAPTIONS = {
    "errors": "exit codes",
    "formatting": "words, sizes",
    "dialects": "other trainers",
    "explain": "known errors",
    "config": "keys, kinds",
    "contracts": "what parts promise",
    "faults": "how it ended",
    "kernels": "float8, attention",
    "launch": "start ranks",
    "dist": "FSDP2, mesh",
    "fast": "on a CPU",
    "profile": "of its time",
    "log": "console",
    "card": "of a model",
    "checkpoint": "save, verify, load",
    "images": "pixels",
    "data": "records → batches",
    "text": "next token",
    "optim": "AdamW, ...",
    "schedules": "learning rate",
    "sinks": "of numbers",
    "similarity": "contrastive",
    "proofs": "masks, first update",
    "step": "one update",
    "evaluations": "validation loss",
    "hf": "Transformers",
    "multimodal": "towers, media",
    "recipe": "settings",
    "stages": "in a row",
    "recipes": "reading YAML",
    "control": "when, best",
    "loop": "step until done",
    "setup": "before step 1",
    "commands": "shared",
    "export": "a model",
    "evaluate": "a run",
    "generate": "from a run",
    "autopsy": "why it hangs",
    "runs": "a table",
    "report": "a page",
    "build": "recipe → parts",
    "plan": "memory, time",
    "check": "before a run",
    "run": "on all ranks",
    "prove": "resumes exactly",
    "drills": "faults on purpose",
    "submit": "to a cluster",
    "own_loop": "from Python",
    "audio": "speech and text",
    "diffusion": "images, denoising",
    "embedding": "pairs, contrastive",
    "language": "text, chat",
    "reasoning": "reason, answer",
    "vision": "images and text",
}
"""A few words for each room."""

SHARED = ("hf", "images", "multimodal", "similarity", "text")
FASTER = ("fast", "kernels")
COLOURS = {
    "families": ("#fdf2f8", "#be185d"),
    "tools": ("#fff7ed", "#c2410c"),
    "engine": ("#eef2ff", "#4338ca"),
    "shared by families": ("#f0fdfa", "#0f766e"),
    "faster, optional": ("#fefce8", "#a16207"),
    "foundation": ("#f1f5f9", "#334155"),
}
"""Paper and ink of each kind of room, in the order of the legend."""

WIDTH = 980
LEFT, RIGHT = 28, 912
ROOF_TOP, ROOF_HEIGHT = 22, 92
ROOM, GAP, PAD, TITLE = 48, 8, 10, 30
NAME, CAPTION = 8.8, 6.9
"""The widest that a letter of a name and of a caption is, in the fonts of usual systems."""


def rows(floor: Floor) -> list[list[str]]:
    """The rooms of a floor, low to high."""
    if floor.rows == ("families",):
        return [sorted(path.parent.name for path in (ROOT / "fullshard" / "families").glob("*/__init__.py"))]
    starts = [LAYERS.index(start) for each in FLOORS for start in each.rows]
    ends = dict(pairwise(starts))
    return [LAYERS[start : ends[start]] for start in map(LAYERS.index, floor.rows)]


def kind(name: str) -> str:
    """The kind of a room, by its colour in the legend."""
    if name not in LAYERS:
        return "families"
    if LAYERS.index(name) < LAYERS.index(FLOORS[1].rows[0]):
        return "foundation"
    if name not in SERVING:
        return "engine"
    return "shared by families" if name in SHARED else "faster, optional" if name in FASTER else "tools"


def house() -> str:
    """The whole picture."""
    drawn, y = _roof(), ROOF_TOP + ROOF_HEIGHT + 6
    for floor in reversed(FLOORS):
        rooms = rows(floor)
        height = TITLE + len(rooms) * (ROOM + GAP) - GAP + PAD
        drawn += _floor(floor, y, height)
        for row, names in enumerate(reversed(rooms)):
            drawn += _row(names, y + TITLE + row * (ROOM + GAP))
        y += height + 6
    drawn += _arrow(ROOF_TOP + ROOF_HEIGHT + 12, y - 10) + _legend(y + 20)
    return "\n".join([*_head(y + 44), *drawn, "</svg>\n"])


def _head(height: int) -> list[str]:
    mono = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"
    sans = "ui-sans-serif, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="t">',
        '<title id="t">The house: seven floors under a roof, imports go down only</title>',
        "<style>",
        f"  text {{ font: 12px {sans}; fill: #475569 }}",
        f"  .room {{ font: 700 14.5px {mono}; text-anchor: middle }}",
        "  .caption { text-anchor: middle }",
        "  .title { font-size: 15px; font-weight: 700; fill: #0f172a }",
        "  .about { font-size: 13px; font-weight: 400; fill: #64748b }",
        "</style>",
        f'<rect x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="14" fill="#ffffff" stroke="#e2e8f0"/>',
    ]


def _roof() -> list[str]:
    middle, bottom = (LEFT + RIGHT) // 2, ROOF_TOP + ROOF_HEIGHT
    names = " &#160; ".join(ROOF)
    return [
        f'<path d="M{LEFT - 14} {bottom} L{middle} {ROOF_TOP} L{RIGHT + 14} {bottom} Z" fill="#1e293b"/>',
        f'<text class="room" x="{middle}" y="{bottom - 32}" style="fill: #f8fafc">{names}</text>',
        f'<text class="caption" x="{middle}" y="{bottom - 13}" style="fill: #cbd5e1">the command line</text>',
    ]


def _floor(floor: Floor, y: int, height: int) -> list[str]:
    box = f'x="{LEFT}" y="{y}" width="{RIGHT - LEFT}" height="{height}"'
    about = f'<tspan class="about" dx="8">{floor.about}</tspan>'
    return [
        f'<rect {box} rx="5" fill="#ffffff" stroke="#cbd5e1" stroke-width="1.5"/>',
        f'<text class="title" x="{LEFT + PAD}" y="{y + 20}">{floor.title}{about}</text>',
    ]


def _row(names: list[str], y: int) -> list[str]:
    """Rooms as wide as their words need, and all by the same amount wider, so that they fill the row."""
    needs = [max(len(name) * NAME, len(CAPTIONS[name]) * CAPTION) for name in names]
    spare = (RIGHT - LEFT - 2 * PAD - GAP * (len(names) - 1) - sum(needs)) / len(names)
    assert spare >= 8, f"The row {names} is too full: begin another one in FLOORS, or shorten CAPTIONS."
    x, drawn = float(LEFT + PAD), []
    for name, need in zip(names, needs, strict=True):
        paper, ink = COLOURS[kind(name)]
        width, middle = need + spare, x + (need + spare) / 2
        drawn += [
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROOM}" rx="7" fill="{paper}" stroke="{ink}"/>',
            f'<text class="room" x="{middle:.1f}" y="{y + 21}" style="fill: {ink}">{name}</text>',
            f'<text class="caption" x="{middle:.1f}" y="{y + 38}">{CAPTIONS[name]}</text>',
        ]
        x += width + GAP
    return drawn


def _arrow(top: int, bottom: int) -> list[str]:
    x, middle = RIGHT + 24, (top + bottom) // 2
    turned = f'class="caption about" x="{x + 22}" y="{middle}" transform="rotate(90 {x + 22} {middle})"'
    return [
        f'<path d="M{x} {top} L{x} {bottom - 10}" stroke="#64748b" stroke-width="2"/>',
        f'<path d="M{x - 6} {bottom - 11} L{x + 6} {bottom - 11} L{x} {bottom} Z" fill="#64748b"/>',
        f"<text {turned}>imports go down only</text>",
    ]


def _legend(y: int) -> list[str]:
    x, drawn = float(LEFT + PAD), []
    for words, (paper, ink) in COLOURS.items():
        drawn += [
            f'<rect x="{x:.1f}" y="{y - 11}" width="13" height="13" rx="3" fill="{paper}" stroke="{ink}"/>',
            f'<text x="{x + 20:.1f}" y="{y}">{words}</text>',
        ]
        x += 20 + len(words) * CAPTION + 30
    return drawn


if __name__ == "__main__":
    PICTURE.write_text(house(), encoding="utf-8")
