"""The watchdog of a rank: a thread that ends a run that hangs, and says why.

It counts how long the rank has not moved. After `topology.timeout_s`, and before torch's own timeout, it has all ranks
of the machine write their stacks and collectives, one rank merges them into words, and the process ends with exit code
1. SIGQUIT brings the same words without ending anything. If native code holds the GIL for so long that this thread
cannot run, a timer in C writes the stacks and ends the process. Must not know models, data or recipes.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fullshard.contracts.world import World
from fullshard.explain import crash
from fullshard.explain.error_file import REPORTED_BY_LAUNCHER, hand_over
from fullshard.faults import beat, evidence, flight, stacks, words
from fullshard.faults.beat import FOLDER, Beat
from fullshard.faults.stacks import Stacks
from fullshard.faults.units import note as note

EXIT_HUNG = 1
GRACE_S = 20.0
"""How much longer torch waits in a collective than `topology.timeout_s`: the time for a complete dump."""
AUTOPSY = "autopsy.txt"


class Hang(Exception):
    """A run that does not move."""


@contextlib.contextmanager
def watching(folder: Path, world: World, *, ends: bool = True) -> Iterator[None]:
    """Watches this process, a rank of the run in `folder`. `ends`: a hang ends the process."""
    try:
        place = folder / FOLDER
        place.mkdir(parents=True, exist_ok=True)
        pulse = Beat(place, rank=world.rank, world=world.size, timeout_s=world.timeout_s)
        watch = Watchdog(place, pulse, ends=ends)
    except OSError:  # the folder cannot be written, which the run reports itself
        yield
        return
    beat.current, stacks.open_stacks = watch.beat, watch.stacks
    watch.start()
    how = "failed"
    try:
        yield
        how = "finished"
    finally:
        beat.current = stacks.open_stacks = None
        watch.stop(how)


class Watchdog:
    """Looks at the heartbeat of this process about once a second."""

    def __init__(self, folder: Path, pulse: Beat, *, ends: bool) -> None:
        self.folder, self.beat, self._ends = folder, pulse, ends
        self.rank, self.timeout_s = int(pulse.facts["rank"]), float(pulse.facts["timeout_s"])
        self._name = f"rank-{self.rank}"
        for old in (f"{self._name}.flight.json", AUTOPSY, "hang", evidence.ASKED):
            _remove_older(folder / old, than=pulse.facts["started"] - 1)
        self.stacks = Stacks(folder, self.rank)
        self._every_s = min(1.0, self.timeout_s / 20)
        self._still, self._count = 0.0, 0
        self._looked = 0.0
        """How long this rank had stood still when it last looked at the others."""
        self._elsewhere: dict[int, tuple[int, float]] = {}
        """The last sign of life of each rank on another machine, and the same for when it came."""
        self._answered = self._flushed = time.monotonic()
        self._size, self._asked = 0, _time_of(folder / evidence.ASKED)
        self._said = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()
        # Native code may take the GIL before this thread has looked even once.
        self.beat.on_second_step = self._rearm

    def stop(self, how: str) -> None:
        """Ends the watch. A run that finished leaves nothing; one that failed leaves its last heartbeat."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        faulthandler.cancel_dump_traceback_later()
        self.beat.close(how)
        self.stacks.close()
        if how == "finished":
            with contextlib.suppress(OSError):
                for path in self.folder.glob(f"{self._name}.*"):
                    path.unlink()
                (self.folder / evidence.ASKED).unlink(missing_ok=True)
                self.folder.rmdir()  # by the last rank

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(self._every_s):
            now = time.monotonic()
            # A process that was stopped, or a machine that slept, has lost time and does not hang.
            self._look(min(now - before, 2 * self._every_s))
            before = now

    def _look(self, elapsed: float) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._still = 0.0 if self.beat.count != self._count else self._still + elapsed
            self._count = self.beat.count
            self.beat.live()
            self._rearm()
            self._answer()
            if time.monotonic() - self._flushed > 5:
                self._flushed = time.monotonic()
                self.beat.flush()
            if not self._said and self.hangs():
                self._said = True
                self._end_hang()

    def hangs(self) -> bool:
        """Whether this rank has not moved for too long, or waits in a collective or for a stopped rank for too long."""
        if self._still < self.timeout_s / 2:
            self._elsewhere.clear()
            self._looked = 0.0
            return False
        late = self._still > self.timeout_s
        if late and beat.must_move(beat.PHASES[self.beat.phase], self.beat.step, self.beat.first_step):
            return True
        if self._a_rank_is_stopped() and late:
            return True
        ages = [self._age(entry) for entry in flight.entries(stacks=False) if not entry.get("retired")]
        return any(age > max(self.timeout_s, limit - GRACE_S) for age, limit in ages)

    def _a_rank_is_stopped(self) -> bool:
        """A save may take long, and ranks wait long for each other in it; but not for such a one. On another machine it
        is one that gives no sign of life for `topology.timeout_s`, counted here: two machines have two clocks."""
        if self._still - self._looked < self.timeout_s / 20:  # many ranks read the same files over a network
            return False
        self._looked, stopped = self._still, False
        for rank, reading in beat.read_all(self.folder).items():
            state = evidence.state_of(reading)
            stopped |= state == "stopped"
            if state == "elsewhere":
                if self._elsewhere.get(rank, (-1, 0.0))[0] != reading.alive:
                    self._elsewhere[rank] = reading.alive, self._still
                stopped |= self._still - self._elsewhere[rank][1] > self.timeout_s
        return stopped

    def _age(self, entry: dict[str, object]) -> tuple[float, float]:
        """How long a collective has been pending, and how long torch waits for it."""
        created = int(str(entry["time_created_ns"])) / 1e9
        age = self._still if self.beat.clock_was_set() else time.time() - created
        return age, float(str(entry.get("timeout_ms") or 0)) / 1000

    def _rearm(self) -> None:
        """Sets the timer in C again: it fires only if this thread cannot run."""
        # In every phase: code that holds the GIL for so long does not come back.
        if self._ends and self.beat.step > self.beat.first_step:
            # A single rank has nobody else to report it: its stacks go to the console.
            place = sys.__stderr__ if self.beat.facts["world"] == 1 and sys.__stderr__ else self.stacks.file
            faulthandler.dump_traceback_later(self.timeout_s + GRACE_S / 2, file=place, exit=True)

    def _answer(self) -> None:
        """Follows SIGQUIT, whose handler has just written stacks, and requests from other nodes."""
        # Another time of the file, not a later one: somebody may have set the clock.
        size, asked = self.stacks.size(), _time_of(self.folder / evidence.ASKED)
        new, self._asked = asked not in (0.0, self._asked), asked
        if size > self._size:
            self._size, self._answered = size, time.monotonic()
            self._dump_rest()
            if evidence.first_to_make(self.folder / evidence.ASKED, stale_s=10):
                threading.Thread(target=self._say_by_hand, name="autopsy", daemon=True).start()
        elif new and time.monotonic() - self._answered > 2:
            self._answered = time.monotonic()
            self._dump()

    def _dump(self) -> None:
        self.stacks.dump()
        self._size = self.stacks.size()
        self._dump_rest()

    def _dump_rest(self) -> None:
        """What the signal handler cannot write: the stacks of this rank's workers, and its collectives."""
        evidence.quit_workers(self.folder, rank=self.rank, process=os.getpid())
        flight.write(self.folder / f"{self._name}.flight.json", self.beat)

    def _say_by_hand(self) -> None:
        """SIGQUIT by hand: asks all ranks, and prints where each one is."""
        with contextlib.suppress(OSError):
            readings = beat.read_all(self.folder)
            others = {rank: reading for rank, reading in readings.items() if rank != self.rank}
            asked = evidence.ask(self.folder, others)
            ranks = evidence.gather(self.folder, readings, asked=asked)
            lines = words.moving(ranks) or words.report(ranks, world=int(self.beat.facts["world"]))
            _print(["Where the ranks are (SIGQUIT):", *(f"  {line}" for line in lines)])

    def _end_hang(self) -> None:
        if self._ends:
            _ignore_sigterm()
        self._dump()
        with contextlib.suppress(Exception):
            if evidence.first_to_make(self.folder / "hang", stale_s=600):
                self._explain_hang()
            elif self._ends:
                # The rank that explains it waits for our dump, and the launcher would end it if we were first.
                evidence.wait_for((self.folder / AUTOPSY).exists, seconds=GRACE_S / 2)
        if self._ends:
            leave()

    def _explain_hang(self) -> None:
        """Merges the dumps of all ranks into the crash folder, prints the words and leaves them for the launcher."""
        readings = beat.read_all(self.folder)
        others = {rank: reading for rank, reading in readings.items() if rank != self.rank}
        asked = evidence.ask(self.folder, others)
        ranks = evidence.gather(self.folder, readings, asked=asked)
        lines = words.report(ranks, world=int(self.beat.facts["world"]))
        text = "\n".join([words.title(ranks), *(f"  {line}" for line in lines)])
        error = Hang(text)
        made = crash.write(
            error, folder=self.folder.parent, rank=self.rank, world=int(self.beat.facts["world"]), step=None
        )
        keep(self.folder, made, text)
        last = f"\nCrash folder: {made}" if made else ""
        more = f"{text}\n  {_next(self._ends)}{last}"
        if not (
            REPORTED_BY_LAUNCHER in os.environ and self._ends and hand_over(more, crash=str(made) if made else None)
        ):
            _print(more.splitlines())
        _write(self.folder / AUTOPSY, text)
        for rank in ranks:
            if rank.state == "stopped":  # it could not end
                with contextlib.suppress(OSError):
                    os.kill(rank.process, signal.SIGCONT)


def _next(ends: bool) -> str:
    if ends:
        return "The ranks end. The same command continues from the last checkpoint."
    return "It goes on waiting: interrupt it, and run it again to continue from the last checkpoint."


def keep(folder: Path, made: Path | None, text: str) -> None:
    """Copies the dumps into the crash folder, beside the words about them."""
    if made is None:
        return
    with contextlib.suppress(OSError):
        _write(made / AUTOPSY, text)
        for path in folder.glob("rank-*.*"):
            if path.suffix != ".beat" and path.stat().st_size:
                shutil.copyfile(path, made / path.name)


def leave() -> None:
    """Ends this process and those that it started, whatever they do."""
    with contextlib.suppress(Exception):
        import psutil  # type: ignore[import-untyped]

        for child in psutil.Process().children(recursive=True):
            child.kill()
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)
    flush.start()
    flush.join(timeout=2)
    os._exit(EXIT_HUNG)


def _ignore_sigterm() -> None:
    """This process ends by itself: if another rank is faster, the launcher's SIGTERM is no request to save. Python lets
    only the main thread set handlers, and that one hangs."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(1))


def _write(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(text + "\n", encoding="utf-8")
    os.replace(new, path)


def _print(lines: list[str]) -> None:
    """Bypasses Python's files, whose locks another thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, ("\n".join(lines) + "\n").encode())


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _remove_older(path: Path, *, than: float) -> None:
    """A file of the future is older, too: somebody has set the clock back since."""
    with contextlib.suppress(OSError):
        if not than <= path.stat().st_mtime <= time.time() + evidence.CLOCKS_APART_S:
            path.unlink()
