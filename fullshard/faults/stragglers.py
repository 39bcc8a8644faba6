"""Finds a rank that is slower than the others, and says why.

Ranks wait for each other in every step, so all of them have the same wall time. What differs is measured by itself:
waiting for data, the host's own work, and the optimizer update, which is equally large on every rank and waits for
nobody. The numbers travel with those of a logged step, so they cost no collective. Must not know collectives, the loop
or what a step computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

STEPS = 50
"""How many steps are compared at a time."""
SHARE = 0.25
"""A rank is a straggler if it is slower than the median rank by this share of a step."""
WARM_UP = 3
"""The first steps of a process compile and allocate; they are not compared."""
_CAUSES = {
    "data": "it waits for data",
    "host": "its own Python code takes longer (a busy or slow CPU)",
    "update": "its optimizer updates take longer (a slow {device})",
}


class Stragglers:
    """Times this rank, and compares all ranks."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        rank: int,
        device: torch.device,
        totals: Callable[[], Mapping[str, float]],
        warn: Callable[[str], None],
        event: Callable[..., None],
        measured: Callable[..., None] | None = None,
    ) -> None:
        """`names` says for each rank where it is; `totals` gives the seconds of this rank by phase. What all ranks find
        in their first steps goes to `measured`, once."""
        self._names, self._rank, self._gpu = names, rank, device.type == "cuda"
        self._totals, self._warn, self._event = totals, warn, event
        self._measured = measured
        self._clock = time.perf_counter
        self._steps = -WARM_UP
        self._slow: set[int] = set()
        """Ranks whose spell has been reported."""
        self._reset()

    def _reset(self) -> None:
        self._host = self._idle = self._update = self._launched = 0.0
        self._events: list[tuple[Any, Any]] = []
        self._before, self._began = dict(self._totals()), self._clock()
        self._left: tuple[float, float] | None = None
        """When the last step was launched, and the seconds by then that were not the host's own."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """The launch of a step. With a GPU the host only launches work; on a CPU it also waits for other ranks, so only
        the time between two steps is its own."""
        began = self._clock()
        if self._left is not None:
            self._host += began - self._left[0] - (self._elsewhere() - self._left[1])
        yield
        self._steps += 1
        if self._steps == 0:
            self._reset()
        ended = self._clock()
        self._launched += ended - began if self._steps > 0 else 0.0
        self._host += ended - began if self._gpu and self._steps > 0 else 0.0
        self._left = ended, self._elsewhere()

    def _elsewhere(self) -> float:
        """Seconds so far in phases that wait for data, a device, a disk or other ranks."""
        return sum(seconds for phase, seconds in self._totals().items() if phase != "log")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The host waits for its own device: as long as it does, neither data nor Python holds up the run."""
        began = self._clock()
        yield
        waited = self._clock() - began
        self._idle += waited
        self._host -= waited  # it is between two steps

    def time_updates(self, optimizer: torch.optim.Optimizer) -> None:
        """Measures every `optimizer.step()`; not for one that talks to other ranks."""
        if getattr(optimizer, "gathers", False):
            return
        on_gpu = any(p.is_cuda for group in optimizer.param_groups for p in group["params"])
        begun: list[Any] = []

        def stamp() -> Any:
            if not on_gpu:
                return self._clock()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        def after(*_: Any) -> None:
            if self._steps >= 0:
                self._events.append((begun.pop(), stamp()))

        optimizer.register_step_pre_hook(lambda *_: begun.__setitem__(slice(None), [stamp()]))
        optimizer.register_step_post_hook(after)

    def beside(self, others: torch.Tensor) -> torch.Tensor:
        """These (sum, count) rows, then this rank's seconds among zeros: a sum over ranks gathers those of all."""
        rows = torch.zeros(2 * len(self._names), 2, dtype=torch.float64)
        if self._steps >= STEPS:
            pairs, self._events = self._events, []
            if pairs and not isinstance(pairs[-1][1], float):
                pairs[-1][1].synchronize()  # the caller waits for this step anyway
            self._update = sum(_seconds(*pair) for pair in pairs)
            data = self._totals()["data"] - self._before["data"]
            rows[2 * self._rank] = torch.tensor([data, self._host])
            rows[2 * self._rank + 1] = torch.tensor([self._idle, self._update])
        return torch.cat([others, rows.to(others.device)])

    def compare(self, rows: list[list[float]], *, step: int) -> list[list[float]]:
        """Reports a rank that became slow; after a spell it may be reported again. Returns the other rows."""
        others, rows = rows[: -2 * len(self._names)], rows[-2 * len(self._names) :]
        if self._steps < STEPS:
            return others
        paused = sum(self._totals()[phase] - self._before[phase] for phase in ("evaluate", "save"))
        seconds, steps = self._clock() - self._began - paused, self._steps
        per_rank = [
            {"data": a[0], "host": a[1], "idle": b[0], "update": b[1]}
            for a, b in zip(rows[::2], rows[1::2], strict=True)
        ]
        if self._measured is not None:
            # What the phase holds besides launches: reading the numbers of a logged step, which waits for the GPU.
            more = self._totals()["compute"] - self._before["compute"] - self._launched if self._gpu else 0.0
            self._measured(per_rank, rank=self._rank, seconds=seconds, steps=steps, more=max(more, 0.0))
            self._measured = None
        found = slower(per_rank, seconds=seconds)
        for rank, (phase, share) in found.items():
            if rank not in self._slow:
                cause = _CAUSES[phase].format(device="GPU" if self._gpu else "CPU")
                usual = "the other rank" if len(self._names) == 2 else "the median"
                self._warn(
                    f"{self._names[rank]} has been {100 * share:.0f}% slower than {usual} over the last {steps:,} "
                    f"steps: {cause}."
                )
                self._event("straggler", step, rank=rank, place=self._names[rank], phase=phase, slower=round(share, 3))
        self._slow, self._steps = set(found), 0
        self._reset()
        return others


def slower(ranks: Sequence[dict[str, float]], *, seconds: float) -> dict[int, tuple[str, float]]:
    """The ranks that are slower than the median one, each with the phase and the share; all numbers are in seconds.

    Data and host count by what they add to the step, less the time in which the rank was idle anyway. The update is a
    sample of how fast a device computes, so it counts by its own ratio."""
    found: dict[int, tuple[str, float]] = {}
    if len(ranks) < 2:
        return found
    middle = {name: median(rank[name] for rank in ranks) for name in ("data", "host", "update")}
    if len(ranks) == 2:  # the median of two would be half way
        middle = {name: min(rank[name] for rank in ranks) for name in middle}
    for number, rank in enumerate(ranks):
        phase, lost = max(((name, rank[name] - middle[name]) for name in ("data", "host")), key=lambda each: each[1])
        lost = min(lost - rank["idle"], 0.999 * seconds)
        share = lost / (seconds - lost) if lost > 0 else 0.0
        ratio = rank["update"] / middle["update"] - 1 if middle["update"] > 0 else 0.0
        if max(share, ratio) >= SHARE:
            found[number] = (phase, share) if share >= ratio else ("update", ratio)
    return found


def _seconds(begun: Any, ended: Any) -> float:
    return float(ended - begun) if isinstance(begun, float) else begun.elapsed_time(ended) / 1000


__all__ = ["SHARE", "STEPS", "Stragglers", "slower"]
