"""One run folder in brief: how it ended or that it runs, how far it is, its best, its recipe.

Reads only the ends of files, so that hundreds of runs take a second. Whatever is missing or damaged stays unknown, and
is named. Must not import torch, nor change anything.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fullshard.explain import crash
from fullshard.faults import beat, evidence

METRICS, RECIPE, LOG = "metrics.jsonl", "recipe.resolved.yaml", "log.txt"
TAIL_BYTES = 2**17
"""How much of the end of metrics.jsonl and of the log is read."""
STATE_BYTES = 2**24
"""A larger state.json is not read."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STEPS = re.compile(r"^[\d :-]{19} rank 0 +steps +([\d,]+) = ", re.MULTILINE)
_HOLDER = re.compile(r"process (\d+) on (\S+) since")
STATES = ("finished", "running", "saved after a signal", "stopped", "died")


@dataclass
class Run:
    """What a run folder says. None: not known."""

    folder: Path
    state: str = "stopped"
    """One of STATES."""
    why: str = ""
    step: int = 0
    steps: int | None = None
    """The steps that the recipe asks for."""
    best: float | None = None
    best_by: str | None = None
    best_step: int | None = None
    loss: float | None = None
    """The training loss that was logged last."""
    seconds: float | None = None
    """Training time, earlier starts included."""
    updated: float = 0.0
    """When it last wrote a number, as seconds since the epoch."""
    recipe: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """What could not be read."""


def find(folder: Path) -> list[Path]:
    """The run folders in a folder, those of a folder of folders too, or the folder itself."""
    if is_run(folder):
        return [folder]
    found: list[Path] = []
    for inside in _folders(folder):
        found += [inside] if is_run(inside) else [each for each in _folders(inside) if is_run(each)]
    return sorted(found)


def is_run(folder: Path) -> bool:
    """Whether a run wrote into it: only runs leave one of these files in a folder."""
    return any((folder / name).is_file() for name in (RECIPE, METRICS)) or bool(crash.newest(folder))


def _folders(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as inside:
            yield from [Path(each.path) for each in inside if each.is_dir() and not each.name.startswith(".")]
    except OSError:
        return


def read_run(folder: Path) -> Run:
    """All that is known about one run."""
    run = Run(folder)
    records = _records(run)
    run.recipe = _recipe(run)
    logged = [record for record in records if record.get("kind") == "train"]
    if logged:
        run.step = _number(logged[-1].get("step"), int) or 0
        run.loss, run.seconds = _number(logged[-1].get("loss")), _number(logged[-1].get("seconds"))
    run.steps = _steps(run)
    ended = _ended(records)
    if ended is not None:
        run.step = _number(ended.get("step"), int) or run.step
        run.seconds = _number(ended.get("seconds"))
    _take_best(run, ended if ended is not None else _progress(run))
    run.state, run.why = _state(run, ended)
    return run


def _records(run: Run) -> list[dict[str, Any]]:
    """The last records. A line that is cut, or is no object, is left out."""
    path = run.folder / METRICS
    found: list[dict[str, Any]] = []
    try:
        run.updated = path.stat().st_mtime
        lines = crash.tail(path, size=TAIL_BYTES).split("\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        run.problems.append(f"{METRICS} cannot be read ({error.strerror or error})")
        return []
    damaged = 0
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            damaged += bool(line.strip())
            continue
        if isinstance(record, dict):
            found.append(record)
    if damaged and not found:
        run.problems.append(f"{METRICS} holds no record at its end")
    return found


def _ended(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """How the run said it ended, unless it went on after that."""
    for record in records[::-1]:
        if record.get("event") == "finished":
            return record
        if record.get("kind") in ("train", "validation"):
            return None
    return None


def _recipe(run: Run) -> dict[str, Any]:
    try:
        text = (run.folder / RECIPE).read_text(encoding="utf-8")
        found = yaml.load(text, Loader=_LOADER)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        found = None
    if not isinstance(found, dict):
        run.problems.append(f"{RECIPE} cannot be read")
        return {}
    return {str(key): value for key, value in found.items()}


def _steps(run: Run) -> int | None:
    """From the recipe; if it counts in epochs, from the header in the log."""
    duration = run.recipe.get("duration")
    stated: int | None = _number(duration.get("steps"), int) if isinstance(duration, dict) else None
    if stated is not None:
        return stated
    try:
        with (run.folder / LOG).open("rb") as file:
            found = _STEPS.findall(file.read(TAIL_BYTES).decode("utf-8", errors="replace"))
    except OSError:
        return None
    return int(found[-1].replace(",", "")) if found else None


def _progress(run: Run) -> dict[str, Any]:
    """The progress in the last checkpoint, for a run that has not said how it ended."""
    path = run.folder / "last" / "state.json"
    try:
        if path.stat().st_size > STATE_BYTES:
            return {}
        progress = json.loads(path.read_text(encoding="utf-8"))["progress"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return progress if isinstance(progress, dict) else {}


def _take_best(run: Run, facts: dict[str, Any]) -> None:
    run.best, run.best_step = _number(facts.get("best")), _number(facts.get("best_step"), int)
    run.best_by = facts["best_by"] if isinstance(facts.get("best_by"), str) else None


def _state(run: Run, ended: dict[str, Any] | None) -> tuple[str, str]:
    if is_alive(run.folder):
        return "running", ""
    if ended is not None:
        stopped = ended.get("stopped")
        if stopped == "signal":
            return "saved after a signal", ""
        return "finished", "out of patience" if stopped == "patience" else ""
    if made := crash.newest(run.folder):
        text = _first_rank(made)
        guard = "NumericalError" in text
        return ("stopped", "by a numerical guard") if guard else ("died", f"see {made.name}")
    return (
        ("died", "without a word") if run.step or (run.folder / beat.FOLDER).is_dir() else ("stopped", "before step 1")
    )


def _first_rank(made: Path) -> str:
    for path in sorted(made.glob("rank-*.txt")):
        try:
            return crash.tail(path, size=TAIL_BYTES)
        except OSError:
            continue
    return ""


def is_alive(folder: Path) -> bool:
    """Whether a rank lives: one of this machine by its process, one of another by its heartbeat."""
    beats = beat.read_all(folder / beat.FOLDER)
    if not beats:
        return _prepares(folder)
    states = {rank: evidence.state_of(reading) for rank, reading in beats.items()}
    fresh = (
        beats[rank].age() <= float(beats[rank].facts["timeout_s"]) for rank in beats if states[rank] == "elsewhere"
    )
    return any(state in ("running", "stopped", "blocked") for state in states.values()) or any(fresh)


def _prepares(folder: Path) -> bool:
    """Whether a process of this machine holds the folder, before its ranks have a heartbeat."""
    try:
        held = _HOLDER.search(folder.with_name(f".{folder.name}.lock").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if held is None or held[2] != socket.gethostname() or (folder / METRICS).exists():
        return False
    return beat.born(int(held[1])) is not None


def _number(value: Any, kind: type = float) -> Any:
    """The value if it is a number, as `kind`; None otherwise."""
    return kind(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
