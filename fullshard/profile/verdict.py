"""What limits a run, from phases that its ranks measure anyway, and the one setting most likely to help.

Said once, when the ranks have compared their first steps after warm-up. The thresholds are those of docs/speed.md.
Must not measure anything, import torch, nor know recipes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.contracts.world import World

DATA = 0.10
"""Waiting for data takes this share of the time: data limits the run."""
HOST, IDLE = 0.60, 0.05
"""The host is busy for the first share of the time, and waits for its GPU for less than the second: the host limits."""
HOST_CPU = 0.20
"""On a CPU: the share of the time between steps, in which nothing is computed."""
UPDATE = 0.25
"""The optimizer update, which only moves memory, takes this share of the time: memory bandwidth limits."""
MFU = 0.35
"""From this MFU on, with work that is done twice counted twice, arithmetic limits."""
_REPEATED = {"full": 4 / 3}
"""How much more is computed with activation checkpointing; selective repeats what is cheap."""


@dataclass(frozen=True)
class Phases:
    """Seconds of the same steps, on one rank."""

    seconds: float
    """All of them, without pauses for evaluation and saves."""
    steps: int
    data: float
    """Waiting for data: the rank that waits longest, since all wait for it."""
    host: float
    """The host's own work. With a GPU that is launching; on a CPU, what happens between steps."""
    idle: float
    """The host waits for its GPU."""
    update: float
    """The optimizer update, on the device; 0 if it was not measured."""

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, float]], *, rank: int, seconds: float, steps: int, more: float) -> Phases:
        """From what every rank has measured; `more` is time that this one waited for its GPU besides."""
        own, waited = ranks[rank], max(each["data"] for each in ranks)
        return cls(seconds, steps, waited, own["host"], own["idle"] + more, own["update"])

    def share(self, name: str) -> float:
        return min(max(float(getattr(self, name)) / self.seconds, 0.0), 1.0) if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Tuning:
    """The settings that decide what helps."""

    gpu: bool
    ranks: int
    nodes: int
    workers: int
    compiled: bool
    recompute: str
    precision: str
    strategy: str

    @classmethod
    def of(cls, world: World, model: Any, *, workers: int) -> Tuning:
        """Those of a sharded model on these ranks."""
        return cls(
            gpu=world.device.type == "cuda",
            ranks=world.size,
            nodes=world.num_nodes,
            workers=workers,
            compiled=model.plan.compile,
            recompute=model.plan.activation_checkpointing,
            precision=model.precision.word,
            strategy=model.plan.layout.strategy,
        )


@dataclass(frozen=True)
class Verdict:
    """What limits the run."""

    limit: str
    """compute, memory bandwidth, host, data, communication; or `compute or communication`, which only --profile
    separates."""
    because: str
    setting: str
    """What to change; empty: no setting is likely to help."""

    @property
    def line(self) -> str:
        helps = f"Most likely to help: {self.setting}." if self.setting else "No setting is likely to help."
        return f"Limited by {self.limit}: {self.because}. {helps}"

    def facts(self, phases: Phases) -> dict[str, Any]:
        """For metrics.jsonl: the verdict, and the shares of the time that it follows from."""
        shares = {name: round(phases.share(name), 4) for name in ("data", "host", "idle", "update")}
        return {"limit": self.limit, "because": self.because, "setting": self.setting, "steps": phases.steps, **shares}


def verdict(phases: Phases, tuning: Tuning, *, mfu: float | None) -> Verdict:
    """What limits a run; `mfu` is the one logged with these steps, if the peak of the device is known."""
    if phases.share("data") >= DATA:
        because = f"{phases.share('data'):.0%} of the time is spent waiting for data"
        return Verdict("data", because, f"data.workers above {tuning.workers}, or data on a faster disk")
    return _on_gpu(phases, tuning, mfu) if tuning.gpu else _on_cpu(phases, tuning)


def _on_cpu(phases: Phases, tuning: Tuning) -> Verdict:
    if phases.share("host") >= HOST_CPU:
        because = f"{phases.share('host'):.0%} of the time passes between steps, where nothing is computed"
        return Verdict("host", because, "a larger log.every_steps")
    if phases.share("update") >= UPDATE:
        return _update(phases)
    if tuning.ranks == 1:
        return Verdict("compute", f"{1 - phases.share('data'):.0%} of the time is spent in steps, on a CPU", "")
    because = f"{tuning.ranks} ranks compute and send on CPUs, and which takes longer cannot be seen from outside"
    return Verdict("compute or communication", because, "--profile, which measures both")


def _on_gpu(phases: Phases, tuning: Tuning, mfu: float | None) -> Verdict:
    if phases.share("host") >= HOST and phases.share("idle") < IDLE:
        because = (
            f"the host is busy for {phases.share('host'):.0%} of the time and waits for its GPU for "
            f"{phases.share('idle'):.0%}"
        )
        return Verdict("host", because, _fewer_launches(tuning))
    if phases.share("update") >= UPDATE:
        return _update(phases)
    if mfu is None:
        if tuning.ranks == 1:
            return Verdict("compute", "the GPU is busy, and its peak is not known", _less_compute(tuning))
        because = "the GPU is busy, and without a known peak what it does cannot be told apart from outside"
        return Verdict("compute or communication", because, "--profile, which measures both")
    computed = mfu * _REPEATED.get(tuning.recompute, 1.0)
    reached = f"the GPU is busy, and its arithmetic reaches {computed:.0%} of the peak"
    if computed >= MFU or tuning.precision == "fp32":
        return Verdict("compute", reached, _less_compute(tuning))
    if tuning.ranks > 1:
        rest = f"{reached}, with {tuning.ranks} ranks that wait for each other's weights and gradients"
        return Verdict("communication", rest, _less_sent(tuning))
    return Verdict("memory bandwidth", f"{reached}: small or elementwise work", _fewer_launches(tuning))


def _update(phases: Phases) -> Verdict:
    because = f"the optimizer update, which only moves memory, takes {phases.share('update'):.0%} of the time"
    return Verdict("memory bandwidth", because, "a larger batch.global, so that one update serves more samples")


def _fewer_launches(tuning: Tuning) -> str:
    return "a larger batch.per_device" if tuning.compiled else "sharding.compile=true"


def _less_compute(tuning: Tuning) -> str:
    if tuning.precision == "fp32":
        return "precision=bf16"
    return "sharding.activation_checkpointing=selective, if memory allows" if tuning.recompute == "full" else ""


def _less_sent(tuning: Tuning) -> str:
    if tuning.nodes > 1 and tuning.strategy == "full":
        return "sharding.strategy=hybrid, if memory allows"
    if tuning.strategy == "full":
        return "sharding.strategy=grad_op, if memory allows"
    return "a larger batch.per_device"
