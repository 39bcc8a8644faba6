"""The run folders that a report is about, and what each holds: records, log, recipe, units.

Everything is optional: a run that died early has left little, and the page says what is missing. Must not import torch,
nor change a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from fullshard.errors import SetupError
from fullshard.explain import crash
from fullshard.log import metrics
from fullshard.recipes.read import RUN_KEY
from fullshard.report.log_text import LogText

RESOLVED, LOG, UNITS = "recipe.resolved.yaml", "log.txt", "units.json"
_LOG_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Run:
    """One run folder. `label` names it on the page."""

    folder: Path
    label: str

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        path = self.folder / metrics.FILE
        return metrics.read(path) if path.is_file() else []

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The records of a kind that have a step."""
        return [each for each in self.records if each.get("kind") == kind and isinstance(each.get("step"), int)]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [each for each in self.of_kind("event") if each.get("event") == name]

    @cached_property
    def log(self) -> LogText:
        path = self.folder / LOG
        return LogText(crash.tail(path, size=_LOG_BYTES) if path.is_file() else "")

    @cached_property
    def _resolved(self) -> dict[str, Any]:
        try:
            values = yaml.safe_load((self.folder / RESOLVED).read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return values if isinstance(values, dict) else {}

    @property
    def recipe(self) -> dict[str, Any]:
        """Every setting in force; empty if the run ended before it wrote them."""
        return {str(key): value for key, value in self._resolved.items() if key != RUN_KEY}

    @property
    def facts(self) -> dict[str, Any]:
        """Where the recipe came from: command, versions, folder, commit."""
        found = self._resolved.get(RUN_KEY)
        return found if isinstance(found, dict) else {}

    @cached_property
    def units(self) -> list[dict[str, Any]]:
        try:
            found = json.loads((self.folder / UNITS).read_text(encoding="utf-8"))["units"]
        except (OSError, ValueError, KeyError, TypeError):
            return []
        return [unit for unit in found if isinstance(unit, dict)] if isinstance(found, list) else []


def find(names: Sequence[str]) -> list[Run]:
    """The runs that the words of a command line name, each with a label of its own; a run with stages is its stages."""
    folders = list(dict.fromkeys(inside for name in names for inside in _with_stages(_folder(name))))
    labels = [folder.resolve().name for folder in folders]
    if len(set(labels)) < len(labels):
        labels = [f"{folder.resolve().parent.name}/{label}" for folder, label in zip(folders, labels, strict=True)]
    if len(set(labels)) < len(labels):
        labels = [str(folder) for folder in folders]
    return [Run(folder, label) for folder, label in zip(folders, labels, strict=True)]


def _folder(name: str) -> Path:
    if "://" in name:
        raise SetupError(f"{name}: a report reads local files. Copy the run folder here, without its checkpoints.")
    for folder in (Path(name).expanduser(), Path("runs") / name):
        if folder.is_dir():
            return folder
    raise SetupError(
        f"{name}: there is no such run folder, nor runs/{name} here. Give the folder that the run named in its header "
        "as `run folder`."
    )


def _with_stages(folder: Path) -> list[Path]:
    if _is_run(folder):
        return [folder]
    stages = [inside for inside in sorted(folder.iterdir()) if inside.is_dir() and _is_run(inside)]
    if not stages:
        raise SetupError(
            f"{folder} is not a run folder: it has none of {', '.join(_LEFT)}, and no crash folder. Give a folder that "
            "`fullshard train` has written, such as runs/quickstart."
        )
    return sorted(stages, key=_number)


_LEFT = (metrics.FILE, RESOLVED, LOG)


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _LEFT) or crash.newest(folder) is not None


def _number(folder: Path) -> int:
    """The place of a stage in its run."""
    stage = Run(folder, "").facts.get("stage")
    number = stage.get("number") if isinstance(stage, dict) else 0
    return number if isinstance(number, int) else 0


def changed_files(run: Run) -> Iterator[tuple[str, int, int]]:
    """What a reader of the run would see: name, size and time of its files. Two equal answers mean the same page."""
    for path in sorted(run.folder.iterdir()):
        found = path.stat()
        yield path.name, found.st_size if path.is_file() else 0, found.st_mtime_ns
