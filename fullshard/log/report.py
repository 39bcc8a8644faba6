"""What the loop reports: console, metrics.jsonl and meters behind one object.

Must not decide anything, and must not know how numbers are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from fullshard.contracts.data import Quantity
from fullshard.contracts.progress import Progress, Steps
from fullshard.contracts.world import World
from fullshard.dist.world import peaks
from fullshard.faults import beat
from fullshard.log.console import Bar, Console
from fullshard.log.meters import Meters, peak_flops


@dataclass
class Report:
    """What one rank of a run reports; only rank 0 prints and writes."""

    console: Console
    write: Callable[[dict[str, Any]], None]
    """Appends a record to metrics.jsonl and the sinks."""
    world: World
    gpu_use: Callable[[], dict[str, float]] = dict
    """How busy the GPUs were since the last call, if that is known."""
    meters: Meters = field(default_factory=Meters, init=False)
    workers: int = field(default=0, init=False)
    _bar: Bar = field(init=False)

    def measure(
        self,
        progress: Progress,
        *,
        flops: tuple[float, dict[str, float]],
        quantities: Sequence[Quantity],
        workers: int,
    ) -> None:
        """Starts the meters, at `progress` for a run that is resumed; speed is logged in `quantities`."""
        self.workers = workers
        self.console.speeds = {each.name: each.short for each in quantities if each.short}
        self.meters = Meters(
            flops_per_token=flops[0],
            media_flops=flops[1],
            peak_flops=peak_flops(self.world.device_name),
            ranks=self.world.size,
            samples=progress.samples,
            tokens=progress.tokens,
            seconds=progress.seconds,
        )

    def phase(self, name: str, step: int | None = None) -> AbstractContextManager[None]:
        """Counts the time inside it as data, compute, log, evaluate or save."""
        beat.enter(name, step)
        return self.meters.phase(name)

    @contextmanager
    def epoch(self, number: int, of: int, lr: float, steps: Steps) -> Iterator[None]:
        """One epoch, or a part of it, with its bar."""
        self.console.epoch_begin(number, of, lr, steps=steps)
        with self.console.training_bar(steps.end, done=steps.begin) as self._bar:
            yield

    def advance(self) -> None:
        """Counts a step that is not logged."""
        self._bar.advance()

    def log(self, **numbers: float) -> None:
        """Logs a step: step, epoch, loss, lr, grad_norm and whatever else was measured."""
        with self.phase("log"):
            record = self.meters.record(memory_bytes=peaks(self.world.device), **numbers, **self.gpu_use())
            self.write(record)
            self._bar.advance(numbers["loss"])
            self._bar.log(record)
            if self.world.is_main and (advice := self.meters.advice(workers=self.workers)):
                self.console.warn(advice)

    def event(self, name: str, step: int, **facts: Any) -> None:
        self.write({"kind": "event", "event": name, "step": step, **facts})

    def validation(self, numbers: Mapping[str, float], texts: Sequence[str], *, step: int, epoch: float) -> None:
        if numbers:
            self.write({"kind": "validation", "step": step, "epoch": epoch, **numbers})
            self.console.validated(numbers)
        for text in texts:
            self.console.say(text)
