"""The trial of a check on a rank of the pool; sent there by name."""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from fullshard.check.command import trial_rank
from fullshard.recipes.read import read


def trial(settings: list[dict[str, Any]], report: str, folder: str, largest_file: int | None = None) -> int:
    """This rank's trial of its recipe, with the user's files of `folder` on the path; its exit code. Where files may
    not grow beyond `largest_file` bytes, writing fails as on a full disk."""
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        reading = read(settings[int(os.environ["RANK"])])
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, before[1]))
        return trial_rank(reading, Path(report))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.path.remove(folder)


def collected(report: Path) -> dict[int, list[dict[str, Any]]]:
    """What the ranks wrote."""
    return {int(file.stem): json.loads(file.read_text()) for file in sorted(report.glob("[0-9]*.json"))}
