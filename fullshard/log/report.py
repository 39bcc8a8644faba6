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
from fullshard.log.meters import Meters
from fullshard.profile.limits import Limits
from fullshard.profile.mfu import Mfu
from fullshard.profile.verdict import Tuning


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
    limits: Limits = field(init=False)
    _bar: Bar = field(init=False)

    def measure(
        self,
        progress: Progress,
        *,
        flops: tuple[float, dict[str, float]],
        quantities: Sequence[Quantity],
        tuning: Tuning,
    ) -> None:
        """Starts the meters, at `progress` for a run that is resumed; speed is logged in `quantities`."""
        self.limits = Limits(tuning, self.console.say, self.event)
        self.console.speeds = {each.name: each.short for each in quantities if each.short}
        main = quantities[0].name if quantities else "tokens"
        self.meters = Meters(
            mfu=Mfu.of(main, flops, device=self.world.device_name, ranks=self.world.size),
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
            if self.world.is_main and (advice := self.meters.advice(workers=self.limits.tuning.workers)):
                self.console.warn(advice)
            self.limits.say(record)

    def event(self, name: str, step: int, **facts: Any) -> None:
        self.write({"kind": "event", "event": name, "step": step, **facts})

    def validation(self, numbers: Mapping[str, float], texts: Sequence[str], *, step: int, epoch: float) -> None:
        if numbers:
            self.write({"kind": "validation", "step": step, "epoch": epoch, **numbers})
            self.console.validated(numbers)
        if texts:
            self.event("texts", step, texts=list(texts))
        for text in texts:
            self.console.say(text)
