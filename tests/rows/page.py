"""Writes docs/coverage.md from the rows: python -m tests.rows.page"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.rows.rows import ROOT, ROWS, listed

PAGE = ROOT / "docs" / "coverage.md"
TITLES = {
    "S0": "A diffusion project: flags, log lines, dtype errors",
    "S1": "An embedding project: Accelerate's FSDP file and a flat training file",
    "S2": "A multimodal project on desktop recordings: self-started ranks and strategies",
    "S3": "An audio project: fp16, a gradient scaler, checks before training",
    "S4": "A staged language-model project: topologies, stages, several nodes",
}
STATES = {"works": "works", "otherwise": "answered otherwise", "refused": "refused"}
HEAD = """\
# Coverage

fullshard grew out of five documents of training projects. This page lists all {count} things that they ask for, in our
own words, and what became of each: {states}, because
they would be wrong. Tests run every row that can be run, and check that every test and page named here exists. The page
is made from `tests/rows/rows.yaml` by `python -m tests.rows.page`.
"""


def page() -> str:
    """The whole page."""
    count = Counter(row["state"] for row in ROWS.values())
    states = f"{count['works']} work, {count['otherwise']} are answered otherwise, {count['refused']} are refused"
    parts = [HEAD.format(count=len(ROWS), states=states)]
    for document, title in TITLES.items():
        parts += [f"## {document}: {title}", _table(document)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _table(document: str) -> str:
    lines = ["| row | asks for | state | answer | shown by |", "|---|---|---|---|---|"]
    for name, row in ROWS.items():
        if name.startswith(f"{document}-"):
            cells = (name, row["asks"], STATES[row["state"]], str(row["answer"]), _shown(row))
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def _shown(row: dict[str, object]) -> str:
    """What a reader can run or open."""
    shown = []
    if "train" in row:
        shown.append(f"`fullshard train {row['train']}`")
    if "command" in row:
        shown.append(f"`fullshard {row['command']}`")
    if "file" in row:
        shown.append(f"`tests/rows/files/{row['file']}`")
    if "explain" in row:
        shown.append("`fullshard explain`")
    if "log" in row or "folder" in row:
        shown.append("the log and folder of a run")
    return ", ".join([*shown, *map(_link, listed(row.get("see")))])


def _link(target: str) -> str:
    path, _, test = target.partition("::")
    page, _, anchor = path.partition("#")
    if page.startswith("docs/"):
        name = page.removeprefix("docs/")
        return f"[{name}]({name}{'#' + anchor if anchor else ''})"
    return f"`{path}`{' ' + test if test else ''}"


if __name__ == "__main__":
    Path(PAGE).write_text(page(), encoding="utf-8")
