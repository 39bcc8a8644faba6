"""Meters: how fast the run is and where its time goes.

Must not know where the numbers go, and must not import torch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from fullshard.faults.data_wait import DataWait
from fullshard.profile.mfu import Mfu

PHASES = ("data", "compute", "log", "evaluate", "save")
PAUSES = ("evaluate", "save")
"""Phases that are not training: they count towards the length of the run, never towards a rate."""


class _Window:
    """What happened since the last record."""

    def __init__(self, began: float) -> None:
        self.began, self.steps = began, 0
        self.quantities: defaultdict[str, float] = defaultdict(float)
        self.numbers: defaultdict[str, float] = defaultdict(float)
        self.time: defaultdict[str, float] = defaultdict(float)


class Meters:
    """Counts steps and gives one record per window.

    `samples`, `tokens` and `seconds` start where a resumed run stopped. `samples` counts the rows of batches, which
    hold several samples if they are packed; `tokens` the first of the quantities that speed is logged in, which may be
    images instead. The first `warmup` steps of a process (compiling, first allocations) never enter a rate. Read the
    loss inside the phase `compute`: otherwise the wait for an asynchronous device is not counted there.
    """

    def __init__(
        self,
        *,
        mfu: Mfu | None = None,
        samples: int = 0,
        tokens: int = 0,
        seconds: float = 0.0,
        warmup: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.samples, self.tokens = samples, tokens
        self.totals = dict.fromkeys(PHASES, 0.0)
        """Seconds per phase in this process, warm-up included."""
        self.mfu = mfu
        self._clock, self._began, self._warmup = clock, clock() - seconds, warmup
        self._window = _Window(clock())
        self._peaks: dict[str, float] = {}
        self._data_wait = DataWait()
        self.advice = self._data_wait.advice
        self.around: Callable[[str], AbstractContextManager[Any]] = nullcontext
        """Called around every phase, by a profile."""

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of the run, pauses included."""
        return self._clock() - self._began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of a block to one of `PHASES`."""
        began = self._clock()
        try:
            with self.around(name):
                yield
        finally:
            self.add(name, self._clock() - began)

    def add(self, name: str, seconds: float) -> None:
        self.totals[name] += seconds
        self._window.time[name] += seconds

    def step(self, *, samples: int, tokens: int, quantities: Mapping[str, float], **numbers: float) -> None:
        """A step is done; counts are over all ranks, and the mean of `numbers` is logged."""
        self.samples += samples
        self.tokens += tokens
        if self._warmup > 0:
            self._warmup -= 1
            self._window = _Window(self._clock())
            return
        self._window.steps += 1
        for held, found in ((self._window.quantities, quantities), (self._window.numbers, numbers)):
            for name, amount in found.items():
                held[name] += amount

    def record(self, *, memory_bytes: Mapping[str, int] | None = None, **numbers: float) -> dict[str, Any]:
        """The record of the window since the last one, for metrics.jsonl; begins a new window.

        `samples`, `tokens` and `seconds` are since the start of the run; rates, `data_wait` (a share of the training
        time) and `time` (seconds per phase) are of the window. What was not measured is absent.
        """
        record: dict[str, Any] = {"kind": "train", **numbers, "samples": self.samples, "tokens": self.tokens}
        record |= {"seconds": round(self.seconds, 3), **self._rates()}
        for name, held in (memory_bytes or {}).items():  # child processes of this rank come and go
            self._peaks[f"{name}_gib"] = max(self._peaks.get(f"{name}_gib", 0.0), round(held / 2**30, 3))
        record |= self._peaks
        record["time"] = {name: round(seconds, 4) for name, seconds in self._window.time.items()}
        self._window = _Window(self._clock())
        return record

    def _rates(self) -> dict[str, float]:
        window = self._window
        seconds = self._clock() - window.began - sum(window.time.get(name, 0.0) for name in PAUSES)
        if window.steps == 0 or seconds <= 0:
            return {}
        rates = {f"{name}_per_second": round(amount / seconds, 2) for name, amount in window.quantities.items()}
        rates |= {name: round(total / window.steps, 4) for name, total in window.numbers.items()}
        if self.mfu and (share := self.mfu.share(window.quantities, seconds)) is not None:
            rates["mfu"] = round(share, 4)
        waited = window.time.get("data", 0.0)
        rates["data_wait"] = round(waited / seconds, 4)
        self._data_wait.add(window.steps, seconds=seconds, waited=waited)
        return rates
