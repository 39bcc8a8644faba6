"""The heartbeat of a rank: step, phase and FSDP unit, in a small file that others read without the rank's help.

The file is mapped into memory, so a beat is a write of a few bytes: no system call, no lock, nothing on the device. It
stays readable while the rank hangs, is stopped, or is gone. Must not import torch, and must not judge anything.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.faults import steps

FOLDER = "watch"
"""The folder in the run folder that holds the heartbeats and dumps of a run."""
PHASES = ("setup", "data", "compute", "log", "evaluate", "save")
ACTS = ("", "all-gather", "reduce-scatter")
_LIVE = struct.Struct("<Qddqiii4xQ")
_ALIVE, _ALIVE_AT = struct.Struct("<Q"), 64
_FIRST, _FIRST_AT = struct.Struct("<q"), 72
_FACTS_AT, _SIZE = 128, 2**16
_KEPT = 256
"""How many collectives of units a rank remembers."""


class Beat:
    """Writes the heartbeat of this process."""

    def __init__(self, folder: Path, *, rank: int, world: int, timeout_s: float) -> None:
        self.path = folder / f"rank-{rank}.beat"
        self.facts: dict[str, Any] = {
            "rank": rank,
            "world": world,
            "host": socket.gethostname(),
            "boot": boot(),
            "process": os.getpid(),
            "born": born(os.getpid()),
            "thread": threading.get_ident(),
            "timeout_s": timeout_s,
            "started": time.time(),
            "units": [],
        }
        self.count, self.step, self.first_step, self.phase = 0, -1, -1, 0
        self._moved, self._offset = time.monotonic(), time.time() - time.monotonic()
        self.on_second_step: Callable[[], None] | None = None
        """Called once, when a rank has proven that it moves."""
        self.collectives: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        """(unit, act) of the latest collectives of FSDP units, in order."""
        self.alive = 0
        """Signs of life of the process, whatever its rank does."""
        self._unit, self._act = -1, 0
        self._memory, self._mapped = self._open()
        self.describe()
        _FIRST.pack_into(self._memory, _FIRST_AT, self.first_step)
        self.write()

    def _open(self) -> tuple[mmap.mmap, bool]:
        self.path.unlink(missing_ok=True)
        with self.path.open("wb+") as file:
            file.truncate(_SIZE)
            with contextlib.suppress(OSError, ValueError):  # some network file systems map no files
                return mmap.mmap(file.fileno(), _SIZE), True
        return mmap.mmap(-1, _SIZE), False

    def describe(self, **more: Any) -> None:
        """Adds to what does not change from beat to beat."""
        self.facts |= more
        text = json.dumps(self.facts).encode()
        if len(text) > _SIZE - _FACTS_AT - 4:
            text = json.dumps(self.facts | {"units": []}).encode()
        self._memory[_FACTS_AT : _FACTS_AT + 4 + len(text)] = struct.pack("<I", len(text)) + text

    def enter(self, phase: str, step: int | None = None) -> None:
        """A phase of the run begins."""
        self.phase = PHASES.index(phase) if phase in PHASES else self.phase
        self.step = self.step if step is None else step
        if self.first_step < 0:
            self.first_step = self.step
            _FIRST.pack_into(self._memory, _FIRST_AT, self.first_step)
        if self.step > self.first_step and self.on_second_step is not None:
            self.on_second_step()
            self.on_second_step = None
        self.write()

    def collective(self, unit: int, act: int) -> None:
        """A unit is about to be gathered, or its gradients to be reduced."""
        self._unit, self._act = unit, act
        self.collectives.append((unit, act))
        self.write()

    def write(self) -> None:
        """The count is written first and last: a reader that finds two different ones reads again."""
        self.count += 1
        self._moved = time.monotonic()
        now = self._moved, time.time()
        _LIVE.pack_into(self._memory, 0, self.count, *now, self.step, self.phase, self._unit, self._act, self.count)

    def live(self) -> None:
        """A sign of life, also while the rank does not move: a process that is stopped gives none."""
        self.alive += 1
        _ALIVE.pack_into(self._memory, _ALIVE_AT, self.alive)

    def still_s(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self._moved

    def clock_was_set(self) -> bool:
        """Whether somebody has set the clock since the start: times of day before and after cannot be compared."""
        return abs(time.time() - time.monotonic() - self._offset) > 2

    def flush(self) -> None:
        """For readers on other nodes."""
        with contextlib.suppress(OSError, ValueError):
            if self._mapped:
                self._memory.flush()
            else:
                self.path.write_bytes(self._memory[:])

    def close(self, how: str) -> None:
        """The rank has `finished` or `failed`; where it was stays readable."""
        self.describe(ended=how)
        self.write()
        self.flush()
        self._memory.close()


@dataclass(frozen=True)
class Reading:
    """A heartbeat as another process reads it."""

    count: int
    monotonic: float
    wall: float
    step: int
    """The step in progress, from 0; -1 before the first one."""
    phase: str
    unit: str | None
    """The last FSDP unit with a collective."""
    act: str
    alive: int
    """Grows while the process runs."""
    first_step: int
    """The step that the run began with."""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def must_move(self) -> bool:
        """Whether the rank hangs if it does not move, whatever it does."""
        return must_move(self.phase, self.step, self.first_step)

    @property
    def here(self) -> bool:
        """Whether the rank is, or was, on this machine, which has not restarted since."""
        return bool(self.facts["boot"] == boot())

    def age(self) -> float:
        """Seconds since the last beat."""
        return max(time.monotonic() - self.monotonic if self.here else time.time() - self.wall, 0.0)


def must_move(phase: str, step: int, first_step: int) -> bool:
    """Whether a rank in this phase hangs if it does not move. Others may take as long as they need, unless a collective
    takes too long or a rank is stopped; the first step may compile for long."""
    return phase == "data" or (phase == "compute" and step > first_step)


def read(path: Path) -> Reading | None:
    """The heartbeat in a file; None if it has none."""
    for _ in range(5):
        try:
            data = path.read_bytes()
            count, monotonic, wall, step, phase, unit, act, again = _LIVE.unpack_from(data)
            if count == again and count:
                (length,) = struct.unpack_from("<I", data, _FACTS_AT)
                facts = json.loads(data[_FACTS_AT + 4 :][:length])
                units = facts["units"]
                name = units[unit] if 0 <= unit < len(units) else None
                (alive,), (first,) = _ALIVE.unpack_from(data, _ALIVE_AT), _FIRST.unpack_from(data, _FIRST_AT)
                return Reading(count, monotonic, wall, step, PHASES[phase], name, ACTS[act], alive, first, facts)
        except (OSError, ValueError, KeyError, IndexError, struct.error):
            pass
        time.sleep(0.01)
    return None


def read_all(folder: Path) -> dict[int, Reading]:
    """The heartbeats of a run's latest start, by rank."""
    found = [reading for path in folder.glob("rank-*.beat") if (reading := read(path))]
    if not found:
        return {}
    world = max(found, key=lambda reading: float(reading.facts["started"])).facts["world"]
    mine = (reading for reading in found if reading.facts["rank"] < world)
    return {reading.facts["rank"]: reading for reading in sorted(mine, key=lambda each: int(each.facts["rank"]))}


def boot() -> str:
    """Identifies this machine since its last start: its monotonic clock can be compared between processes."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + socket.gethostname()
    return socket.gethostname()


def born(process: int) -> str | None:
    """When a process started, in the kernel's count: a process id may be used again. None: no such process."""
    stat = stat_of(process)
    return stat[19] if stat else None


def stat_of(process: int) -> list[str]:
    """What the kernel says about a process, from its state on; empty if there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return []


current: Beat | None = None
"""The heartbeat of this process, while it is a rank that is watched."""


def enter(phase: str, step: int | None = None) -> None:
    """A phase of the run begins; the first one of a step names it."""
    if step is not None:
        steps.begin(step)
    if current is not None:
        current.enter(phase, step)
