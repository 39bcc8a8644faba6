"""The pages of the documentation: README, docs/ and each family's page."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "benchmarks" / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "fullshard" / "families").glob("*/README.md"),
    ]
)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The places of a page that a link may name, as GitHub and MkDocs spell them."""
    titles = re.findall(r"^#+ (.*)$", prose(text), flags=re.MULTILINE)
    spelled = {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
    return spelled | set(re.findall(r'<a id="([^"]+)"', text))
