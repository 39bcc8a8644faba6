"""`python -m fullshard.explain [FILE]` writes the page of all known failures. Must not do anything else."""

from __future__ import annotations

import sys
from pathlib import Path

from fullshard.explain.render import page

if __name__ == "__main__":
    target = Path(sys.argv[1] if sys.argv[1:] else "docs/troubleshooting.md")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(), encoding="utf-8")
