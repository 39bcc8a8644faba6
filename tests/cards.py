"""Reads the model card of an export with huggingface_hub, and runs the code that it shows."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard


def card(folder: Path) -> ModelCard:
    """The card, as huggingface_hub parses it; the hash in its last line is right."""
    from fullshard.card.write import is_edited

    assert not is_edited(folder / "README.md")
    found = ModelCard.load(folder / "README.md", ignore_metadata_errors=False)
    assert found.data.license is None
    assert "\n# license: fill this in" in (folder / "README.md").read_text()
    for title in ("How to load", "Training data", "Recipe", "Results", "Software", "Licence"):
        assert f"\n## {title}\n" in found.content
    return found


def run_code(folder: Path) -> dict[str, Any]:
    """The names that the card's Python code defines when it runs in its folder."""
    [code] = re.findall(r"```python\n(.*?)\n```", (folder / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    here = os.getcwd()
    os.chdir(folder)
    try:
        exec(code, names)
    finally:
        os.chdir(here)
    return names
