"""The examples of CONTRIBUTING.md as files: a block whose first line is a comment with a file name is that file."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
BLOCK = re.compile(r"^```(?:python|yaml|toml)\n# (\S+\.\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def write_examples(folder: Path, *, below: str | None = None) -> list[str]:
    """Writes the examples into a folder, those under one heading if `below` names it; returns their names."""
    text = PAGE.read_text()
    if below:
        text = text.partition(f"\n## {below}\n")[2].partition("\n## ")[0]
    found = dict(BLOCK.findall(text))
    for name, content in found.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return sorted(found)


def commands(heading: str) -> list[str]:
    """The commands of the last plain block under a heading."""
    text = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    plain: list[str] = [content for language, content in blocks if not language]
    return plain[-1].splitlines()
