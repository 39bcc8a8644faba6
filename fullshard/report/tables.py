"""The tables of a page: tiles, phases of a step, units, events, checkpoints, environment.

Each is plain text and numbers; the template makes markup of them. Must not know HTML.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity
from fullshard.errors import CheckpointError
from fullshard.explain import crash
from fullshard.formatting import readable
from fullshard.formatting.plural import counted
from fullshard.formatting.yaml_text import shown
from fullshard.report.folders import Run
from fullshard.report.phases import phases, shares
from fullshard.report.verdict import best_of, last_step, result_of, took

EVENTS, UNITS = 200, 60
"""The most rows of a table."""
Event = tuple[str, str, str]
_QUIET = ("samples", "texts", "picture", "audio", "finished", "limit", "memory")


def tiles(run: Run) -> Iterator[tuple[str, str, str]]:
    """Name, value and a remark of the numbers that a reader wants first."""
    best, metric, step = best_of(run)
    train = run.of_kind("train")
    if best is not None:
        name = "validation loss" if metric == "loss" else metric.replace("_", " ")
        yield f"best {name}", readable.number(best), f"at step {step:,}" if step is not None else ""
    elif (loss := _last(train, "loss")) is not None:
        yield "last training loss", readable.number(loss), "no validation"
    done, total = last_step(run), run.log.total_steps
    yield "steps", f"{done:,}", f"of {total:,}" if total and total != done else ""
    result = result_of(run) or {}
    if seconds := result.get("seconds") or _last(train, "seconds"):
        yield "time", took(seconds), ""
    for name in [key for key in (train[-1] if train else {}) if key.endswith("_per_second")][:1]:
        yield name.replace("_per_second", " per second"), readable.short(_median(train, name) or 0), "median"
    if mfu := _median(train, "mfu"):
        yield "MFU", f"{mfu:.1%}", "median"
    if memory := max(_values(train, "memory_gib"), default=None):
        foreseen = next((v for key in _predicted(train) for v in _values(train, key)), None)
        yield "peak memory", f"{memory:.3g} GiB", f"predicted {foreseen:.3g} GiB" if foreseen else "per rank"
    for each in [each for each in run.of_kind("event") if each.get("what") == "held between steps"][-1:]:
        real, guess = each["real_gib"] * 2**30, each["predicted_gib"] * 2**30
        near = "as predicted" if not each["error"] else f"predicted {readable.size(guess)}"
        yield "held between steps", readable.size(real), f"by rank 0, {near}"


def _predicted(train: list[dict[str, Any]]) -> list[str]:
    return [key for key in (train[-1] if train else {}) if "predicted" in key and key.endswith("_gib")]


def _values(records: list[dict[str, Any]], name: str) -> list[float]:
    return [v for each in records if isinstance(v := each.get(name), (int, float)) and not isinstance(v, bool)]


def _last(records: list[dict[str, Any]], name: str) -> float | None:
    return next(iter(_values(records[::-1], name)), None)


def _median(records: list[dict[str, Any]], name: str) -> float | None:
    values = sorted(_values(records, name))
    return values[len(values) // 2] if values else None


def phase_rows(run: Run) -> list[dict[str, Any]]:
    """Each phase: seconds in all, milliseconds per step, and its share with where it begins, in percent."""
    spent, at, rows = phases(run), 0.0, list[dict[str, Any]]()
    steps = max(last_step(run), 1)
    for name, share in shares(spent).items():
        rows.append({"name": name, "seconds": spent[name], "per_step_ms": spent[name] / steps * 1e3})
        rows[-1] |= {"share": share * 100, "at": at * 100}
        at += share
    return rows


def unit_rows(run: Run) -> list[dict[str, Any]]:
    """The FSDP units; equal ones in a row are one row."""
    rows: list[dict[str, Any]] = []
    for unit in run.units:
        row = {
            "class": unit.get("class_name"),
            "parameters": _thousands(unit.get("parameters")),
            "trainable": _thousands(unit.get("trainable")),
        }
        row |= {key: _words(unit.get(key)) for key in ("storage", "compute", "reduce")}
        row["tied"] = _words([_words(group) for group in unit.get("tied") or []])
        if rows and {key: rows[-1][key] for key in row} == row:
            rows[-1]["count"] += 1
            rows[-1]["last"] = unit.get("name")
        else:
            rows.append({**row, "name": unit.get("name"), "last": None, "count": 1})
    return rows


def _thousands(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else _words(value)


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


def event_rows(run: Run) -> list[Event]:
    """Step, name and facts of what happened, in order; saves, restarts, what the guard did, slow ranks."""
    rows: list[Event] = []
    for each in run.of_kind("event"):
        name = str(each.get("event"))
        if name in _QUIET:
            continue
        facts = {k: v for k, v in each.items() if k not in ("kind", "event", "step", "start", "stage", "total_step")}
        rows.append((f"{each['step']:,}", name, _told(name, facts)))
    return [
        row for name, group in itertools.groupby(rows, key=lambda row: row[1]) for row in _folded(name, list(group))
    ]


def _folded(name: str, rows: list[Event]) -> list[Event]:
    """Many saves in a row are one row."""
    if name != "saved" or len(rows) < 4:
        return rows
    return [(f"{rows[0][0]} to {rows[-1][0]}", f"saved {len(rows)} times", f"the last time, {rows[-1][2]}")]


def _told(name: str, facts: dict[str, Any]) -> str:
    if name == "saved":
        return (
            f"training waited {facts.get('stall_seconds', 0):.2f} s" if _is_number(facts.get("stall_seconds")) else ""
        )
    if name == "restart":
        return f"restart {facts.get('restart')} of {facts.get('of')}: {facts.get('why')}"
    if name == "rollback":
        left_out = facts.get("sample_ids")
        many = counted(len(left_out), "sample") if isinstance(left_out, list) else "samples"
        return f"{facts.get('cause')} {many} left out"
    if name == "out_of_memory":
        return f"rank {facts.get('rank')}: micro-batches of {facts.get('per_device')} rows, not {facts.get('before')}"
    if name == "straggler" and _is_number(facts.get("slower")):
        return f"{facts.get('place')} is {facts['slower']:.0%} slower than others ({facts.get('phase')})"
    return ", ".join(f"{key.replace('_', ' ')} {shown(value)}" for key, value in facts.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def checkpoint_rows(run: Run, *, verify: bool) -> list[dict[str, Any]]:
    """The checkpoints in the run folder, newest first: are sizes as the manifest says, and checksums, if asked?"""
    pointers = {name: files.pointed(run.folder, name) for name in ("best", "last")}
    rows = []
    for checkpoint in reversed(files.published(run.folder)):
        marks = [name for name, target in pointers.items() if target and target.resolve() == checkpoint.resolve()]
        row = {"name": checkpoint.name, "marks": marks, "size": "", "files": 0, "problem": "", "format": ""}
        rows.append(row | _checked(checkpoint, verify=verify))
    return rows


def _checked(checkpoint: Path, *, verify: bool) -> dict[str, Any]:
    try:
        manifest = files.read_manifest(checkpoint)
        listed = manifest["files"]
        problems = (
            integrity.problems(checkpoint) if verify else integrity.file_problems(checkpoint, listed, checksums=False)
        )
        size = readable.size(sum(int(entry["size_bytes"]) for entry in listed.values()))
    except (CheckpointError, KeyError, TypeError, ValueError, OSError) as error:
        return {"problem": str(error)}
    state = {"size": size, "files": len(listed), "format": _words(manifest.get("format"))}
    return {**state, "problem": "; ".join(problems[:3])}


def environment_rows(run: Run) -> list[tuple[str, str]]:
    """Versions, where and when, and the machine if a crash has described it."""
    facts, log = run.facts, run.log
    rows = [(str(name), str(version)) for name, version in _pairs(facts.get("versions"))]
    rows += [(key.replace("_", " "), str(facts[key])) for key in ("git_commit", "folder", "source") if facts.get(key)]
    rows += [("run folder", str(run.folder.resolve()))]
    rows += [(name, time) for name, time in (("first line", log.began), ("last line", log.ended)) if time]
    made = crash.newest(run.folder)
    if made is not None and (made / "environment.json").is_file():
        with contextlib.suppress(OSError, ValueError):
            described = json.loads((made / "environment.json").read_text(encoding="utf-8"))
            rows += [(str(key), shown(value)) for key, value in _pairs(described)]
    return rows


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, dict) else []
