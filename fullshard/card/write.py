"""Writes the model card of an export as README.md, and never over one that somebody has edited.

A card ends with a line that holds its own hash: if both agree, nobody has edited it. Must not know what a card says.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

from fullshard.card.facts import Exported
from fullshard.card.text import card

README, BESIDE = "README.md", "README.new.md"
_MARK = re.compile(r"\n<!-- written by fullshard, sha256 ([0-9a-f]{16}) -->\n$")


def write_card(folder: Path, exported: Exported, *, before: Path | None = None) -> str | None:
    """Writes the card of what `folder` holds; `before` is the export that it is about to replace.

    A README.md there that was edited is kept, and the card goes beside it; then the sentence that says so is returned.
    A README.md that a library wrote into `folder` is replaced, unless the model's family is the user's own."""
    ours = type(exported.family).__module__.startswith("fullshard.")
    if (folder / README).is_file() and not ours:
        return None
    text = card(exported, folder)
    edited = before is not None and is_edited(before / README)
    (folder / (BESIDE if edited else README)).write_text(marked(text), encoding="utf-8")
    if not edited or before is None:
        return None
    shutil.copy2(before / README, folder / README)
    return f"{before / README} was edited, so it stays. The card of the new export is {BESIDE} beside it."


def marked(text: str) -> str:
    """A card with its hash at the end."""
    return f"{text}\n<!-- written by fullshard, sha256 {_hash(text)} -->\n"


def is_edited(path: Path) -> bool:
    """Whether a README exists that is not a card as it was written."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    found = _MARK.search(text)
    return found is None or _hash(text[: found.start()]) != found[1]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
