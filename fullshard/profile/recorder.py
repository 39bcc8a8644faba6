"""`--profile`: torch's profiler for a few steps after warm-up, on every rank alike; the trace and its tables.

It changes nothing that is computed, and calls no collective. Ranks of the first node write their traces when the run
ends, rank 0 also the tables. Must not know how a step works.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullshard.contracts.world import World
from fullshard.profile.trace import PREFIX

STEPS, WARM_UP = 5, 3
"""How many steps are profiled unless the option says so, and how many of a process come before them. One more is
profiled and thrown away."""
VARIABLE = "FULLSHARD_PROFILE"
"""Tells the ranks that a launcher starts how many steps to profile."""
FOLDER = "profile"


def asked() -> int:
    """How many steps to profile; 0: none."""
    text = os.environ.get(VARIABLE, "")
    return int(text) if text.isdigit() else 0


class Recorder:
    """Profiles some steps of this process. A step begins when its data is asked for."""

    def __init__(self, steps: int, folder: Path, world: World, meters: Any, say: Callable[[str], None]) -> None:
        self._steps, self._world, self._meters, self._say = steps, world, meters, say
        self._folder = folder / FOLDER
        self._profiler: Any = None
        self._done: Any = None
        """The profiler with its events, until the run ends."""
        self._seen, self._first = 0, 0

    def windows(self, source: Callable[[int, Collection[int]], Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """The same micro-batches; asking for those of a step marks where the one before it ends."""

        def each(step: int, left_out: Collection[int]) -> Iterator[Any]:
            inner = source(step, left_out)
            while True:
                self._begin(step + 1)
                step += 1
                with self._mark("data"):
                    window = next(inner, None)
                if window is None:
                    return
                yield window

        return each

    def phase(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Marks a phase of the run in the trace; that of data begins a step, so it is marked where the step is."""
        return self._mark(name) if name != "data" else contextlib.nullcontext()

    def _mark(self, name: str) -> contextlib.AbstractContextManager[Any]:
        from torch.profiler import record_function

        return record_function(f"{PREFIX}{name}") if self._profiler is not None else contextlib.nullcontext()

    def _begin(self, step: int) -> None:
        began = time.perf_counter()
        self._advance(step)
        # The profiler's own work is neither waiting for data nor training: rates leave out what counts as a save.
        took = time.perf_counter() - began
        self._meters.add("data", -took)
        self._meters.add("save", took)

    def _advance(self, step: int) -> None:
        self._seen += 1
        if self._seen == WARM_UP + 1:
            self._profiler = self._open()
            self._profiler.start()
        elif self._profiler is not None:
            self._profiler.step()
        if self._seen == WARM_UP + 2:
            self._first = step
        if self._seen == WARM_UP + 2 + self._steps:
            self.close()

    def _open(self) -> Any:
        from torch.profiler import ProfilerActivity, profile, schedule

        gpu = [ProfilerActivity.CUDA] if self._world.device.type == "cuda" else []
        return profile(
            activities=[ProfilerActivity.CPU, *gpu],
            schedule=schedule(wait=0, warmup=1, active=self._steps, repeat=1),
            on_trace_ready=self._keep,
            acc_events=True,
        )

    def _keep(self, profiler: Any) -> None:
        self._done = profiler

    def close(self) -> None:
        """Ends a profile that is still open."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def finish(self) -> None:
        """Writes what was found, and says it."""
        self.close()
        trace, rank = self._folder / f"rank-{self._world.rank}.json.gz", self._world.rank
        if self._done is not None and rank < self._world.local_size:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._done.export_chrome_trace(str(trace))
        if not self._world.is_main:
            return
        if self._done is None:
            self._say(f"Nothing was profiled: the run ended within {WARM_UP + 1} steps of its start.")
            return
        from fullshard.profile.table import as_json, as_text
        from fullshard.profile.trace import read_trace, summarise

        found = as_json(summarise(read_trace(trace)), rank=rank, first_step=self._first)
        text = as_text(found)
        (self._folder / "table.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (self._folder / "table.txt").write_text(text + "\n", encoding="utf-8")
        self._say(f"\n{text}\n\nTrace for https://ui.perfetto.dev: {trace}")


@contextlib.contextmanager
def profiled(parts: Any, folder: Path, world: World, say: Callable[[str], None]) -> Iterator[Any]:
    """The parts of a run, profiled if that is asked for."""
    steps = asked()
    if not steps:
        yield parts
        return
    recorder = Recorder(steps, folder, world, parts.report.meters, say)
    parts.report.meters.around = recorder.phase
    try:
        yield replace(parts, windows=recorder.windows(parts.windows))
    except BaseException:
        recorder.close()
        raise
    recorder.finish()
