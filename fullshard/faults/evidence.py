"""What is known about each rank of a run that stands still: heartbeat, process, stacks and collectives.

Read from the run folder and from the system, without the ranks' help; `ask` makes the ranks of this machine write their
stacks first. Must not import torch, and must not judge.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.faults import beat, flight, stacks
from fullshard.faults.beat import Reading
from fullshard.faults.flight import Collective
from fullshard.faults.stacks import Frame

ASKED = "asked"
"""A file that asks all ranks for their dumps, also those on other nodes; whoever made it says what they show."""
ANSWER_S = 4.0
"""How long ranks may take to write their dumps."""
_COARSE_S = 3.0
"""File systems keep coarse times, servers have their own clocks, and a rank that noticed a hang was not asked."""
CLOCKS_APART_S = 60.0
"""A file whose time is further ahead was written before somebody set the clock back."""
_STATES = {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone", "D": "blocked"}


@dataclass(frozen=True)
class Rank:
    """All that is known about one rank."""

    rank: int
    host: str
    process: int
    here: bool
    """Whether it runs on this machine."""
    state: str
    """running, stopped, blocked (in the kernel), gone, elsewhere (another machine), finished or failed."""
    step: int
    phase: str
    unit: str | None
    act: str
    age: float
    """Seconds since it last moved."""
    stack: tuple[Frame, ...] = ()
    """Of the thread that trains, innermost call first."""
    workers: tuple[tuple[Frame, ...], ...] = ()
    """Of the processes that it forked to load data."""
    collectives: tuple[Collective, ...] | None = None
    """None: the interpreter did not answer."""

    @property
    def waits_in(self) -> Collective | None:
        """The collective that it waits in: the oldest pending one of the training itself."""
        pending = [each for each in self.collectives or () if each.pending]
        own = [each for each in pending if not any("checkpoint/background" in frame.file for frame in each.frames)]
        return min(own or pending, key=lambda each: each.record, default=None)


def ask(folder: Path, readings: Mapping[int, Reading], *, wait_s: float = ANSWER_S) -> float:
    """Has the ranks write their dumps, and waits for them; returns the time of the question."""
    asked = time.time()
    with contextlib.suppress(OSError):
        (folder / ASKED).write_text(json.dumps([beat.boot(), os.getpid()]), encoding="utf-8")
    for reading in readings.values():
        if reading.here and state_of(reading) in ("running", "blocked"):
            quit_family(folder, reading)
    ends = time.monotonic() + wait_s
    while time.monotonic() < ends and not all(_answered(folder, each, asked) for each in readings.values()):
        time.sleep(0.1)
    return asked


def quit_family(folder: Path, reading: Reading) -> None:
    """SIGQUIT to a rank, and to the processes that it forked; only to those that are known to listen."""
    with contextlib.suppress(OSError):
        os.kill(reading.facts["process"], signal.SIGQUIT)
    quit_workers(folder, rank=reading.facts["rank"], process=reading.facts["process"])


def quit_workers(folder: Path, *, rank: int, process: int) -> None:
    """SIGQUIT to the processes that a rank has forked."""
    for path in folder.glob(f"rank-{rank}.worker-*.txt"):
        pid = int(path.stem.rpartition("-")[2])
        if (stat := beat.stat_of(pid)) and int(stat[1]) == process:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGQUIT)


def _answered(folder: Path, reading: Reading, asked: float) -> bool:
    """Whether a rank has written all that it can: a rank that is stopped or gone writes nothing."""
    if state_of(reading) not in ("running", "blocked", "elsewhere"):
        return True
    name = f"rank-{reading.facts['rank']}"
    return all(_fresh(folder / f"{name}.{kind}", asked) for kind in ("stacks.txt", "flight.json"))


def _fresh(path: Path, since: float) -> bool:
    try:
        stat = path.stat()
        return stat.st_size > 0 and stat.st_mtime >= since - _COARSE_S
    except OSError:
        return False


def state_of(reading: Reading) -> str:
    """What the system says about a rank's process."""
    if ended := reading.facts.get("ended"):
        return str(ended)
    if not reading.here:
        return "elsewhere"
    stat = beat.stat_of(int(reading.facts["process"]))
    if not stat or stat[19] != reading.facts["born"]:
        return "gone"
    return _STATES.get(stat[0], "running")


def gather(folder: Path, readings: Mapping[int, Reading], *, asked: float | None = None) -> list[Rank]:
    """The evidence about every rank. If they were `asked`, older dumps do not count, nor does the time since."""
    since, waited = (0.0, 0.0) if asked is None else (asked, time.time() - asked)
    return [_rank(folder, reading, since, waited) for reading in readings.values()]


def _rank(folder: Path, reading: Reading, since: float, waited: float) -> Rank:
    facts, name = reading.facts, f"rank-{reading.facts['rank']}"
    text = _text(folder / f"{name}.stacks.txt", since)
    stack = stacks.parse(text).get(f"{int(facts['thread']):#x}") or stacks.of_main(text)
    workers = [stacks.of_main(_text(path, since)) for path in sorted(folder.glob(f"{name}.worker-*.txt"))]
    dump = folder / f"{name}.flight.json"
    collectives = flight.read(dump) if _fresh(dump, since) else None
    return Rank(
        rank=facts["rank"],
        host=facts["host"],
        process=facts["process"],
        here=reading.here,
        state=state_of(reading),
        step=reading.step,
        phase=reading.phase,
        unit=reading.unit,
        act=reading.act,
        age=max(reading.age() - waited, 0.0),
        stack=tuple(stack),
        workers=tuple(tuple(each) for each in workers if each),
        collectives=None if collectives is None else tuple(collectives),
    )


def _text(path: Path, since: float) -> str:
    with contextlib.suppress(OSError):
        if _fresh(path, since):
            return path.read_text(encoding="utf-8", errors="replace")
    return ""


def first_to_make(path: Path, *, stale_s: float) -> bool:
    """Whether this process makes the file; False if another has made it within `stale_s`, and is still there."""
    with contextlib.suppress(OSError):
        if not path.exists():
            path.open("x").close()
            return True
        old = path.stat()
        if _is_over(path) or not -CLOCKS_APART_S <= time.time() - old.st_mtime <= stale_s:
            return _replaced(path, old)
    return False


def _replaced(path: Path, old: os.stat_result) -> bool:
    """Whether this process, among several that find a file stale, is the one that makes it anew."""
    mine = path.with_name(f".{path.name}-{old.st_ino}-{old.st_mtime_ns}")
    mine.open("x").close()
    with contextlib.suppress(OSError):
        now = path.stat()
        if (now.st_ino, now.st_mtime_ns) == (old.st_ino, old.st_mtime_ns):
            os.replace(mine, path)  # its name is free from now on, but the old file is gone
            return True
    mine.unlink()
    return False


def _is_over(path: Path) -> bool:
    """Whether whoever asked with this file has ended, as `fullshard autopsy` does at once."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        machine, process = json.loads(path.read_text(encoding="utf-8"))
        return bool(machine == beat.boot() and not beat.stat_of(process))
    return False


def wait_for(met: Callable[[], Any], *, seconds: float) -> bool:
    """Whether a condition came true in time."""
    ends = time.monotonic() + seconds
    while not (found := bool(met())) and time.monotonic() < ends:
        time.sleep(0.1)
    return found
