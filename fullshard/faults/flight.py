"""torch's flight recorder: the latest collectives of this process, with the lines that called them; gloo and NCCL.

Gloo writes no dump by itself, so a thread of the rank does, as JSON, with the FSDP units that were noted beside it.
Reading needs no torch. Must not know what a hang is.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.faults.beat import ACTS, Beat
from fullshard.faults.stacks import Frame

_KEPT = 200
_WORDS = {
    "all_gather": "all-gather",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "allreduce": "all-reduce",
    "all_to_all": "all-to-all",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
    "send": "send",
    "recv": "receive",
}
"""The first word that a name contains counts."""


@dataclass(frozen=True)
class Collective:
    """One collective of a rank."""

    record: int
    op: str
    group: str
    """The process group's name."""
    seq: int
    """How many collectives this group has had, this one included."""
    pending: bool
    age: float
    """Seconds from its call to the dump."""
    timeout_s: float
    sizes: str
    frames: tuple[Frame, ...]
    unit: str | None = None
    """The FSDP unit that it gathers or reduces."""

    @property
    def by_fsdp(self) -> bool:
        return any("_fsdp_collectives.py" in frame.file for frame in self.frames)


def entries(*, stacks: bool = True) -> list[dict[str, Any]]:
    """What the recorder of this process holds, with the lines that called; empty without torch.distributed."""
    library = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(library, "_dump_fr_trace", None) or getattr(library, "_dump_nccl_trace", None)
    if dump is None:
        return []
    with contextlib.suppress(Exception):  # a watcher must not be a fault itself
        return list(pickle.loads(dump(True, stacks, False)).get("entries", []))
    return []


def write(path: Path, beat: Beat) -> None:
    """Dumps the recorder of this process; the file appears complete."""
    kept = [entry | {"frames": entry.get("frames", [])[:40]} for entry in entries()[-_KEPT:]]
    notes = [[unit, ACTS[act]] for unit, act in tuple(beat.collectives)]
    still_s = beat.still_s() if beat.clock_was_set() else None
    found = {"wall": time.time(), "still_s": still_s, "units": beat.facts["units"], "noted": notes, "entries": kept}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(found, default=str), encoding="utf-8")
    os.replace(new, path)


def read(path: Path) -> list[Collective] | None:
    """The collectives in a dump, oldest first; None if there is no dump."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def parse(dump: dict[str, Any]) -> list[Collective]:
    """The collectives of a dump. The units that were noted belong to the latest collectives of FSDP, kind by kind."""
    found = [_collective(entry, dump) for entry in dump["entries"]]
    named: list[Collective] = []
    noted = {act: [unit for unit, of in dump["noted"] if of == act] for act in ACTS}
    for each in reversed(found):
        # Replicas add up the gradients of the unit that was just reduced.
        act = "reduce-scatter" if each.op == "all-reduce" else each.op
        unit = None
        if each.by_fsdp and noted.get(act):
            number = noted[act].pop() if each.op == act else noted[act][-1]
            unit = dump["units"][number] if number < len(dump["units"]) else None
        named.append(Collective(**{**vars(each), "unit": unit}))
    return named[::-1]


def _collective(entry: dict[str, Any], dump: dict[str, Any]) -> Collective:
    frames = tuple(Frame(each["filename"], int(each["line"]), each["name"]) for each in entry.get("frames", []))
    group = entry.get("process_group") or [str(entry.get("pg_id", 0))]
    age = float(dump["wall"]) - int(entry["time_created_ns"]) / 1e9
    if dump.get("still_s") is not None:  # the clock was set in between
        age = float(dump["still_s"])
    return Collective(
        record=int(entry["record_id"]),
        op=op_of(entry.get("profiling_name", ""), frames),
        group=str(group[0]),
        seq=int(entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id", 0)),
        pending=not entry.get("retired") and entry.get("state") != "completed",
        age=max(age, 0.0),
        timeout_s=float(entry.get("timeout_ms") or 0) / 1000,
        sizes=" ".join("x".join(map(str, size)) for size in entry.get("input_sizes", [])),
        frames=frames,
    )


def op_of(recorded: str, frames: Sequence[Frame]) -> str:
    """The collective that was called: gloo records a reduce-scatter as the all-reduce that it is made of."""
    called = [frame.name for frame in frames if frame.file.endswith("distributed_c10d.py")]
    for name in (*called, recorded):
        text = re.sub(r"^.*:", "", name).lower()
        for part, word in _WORDS.items():
            if part in text:
                return word
    return recorded or "collective"
