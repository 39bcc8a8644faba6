"""Makes what watches a run out of the parts of the run. Must not know recipes, nor how those parts work."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.contracts.progress import Progress
from fullshard.contracts.world import World
from fullshard.faults.guard import Guard
from fullshard.faults.judge import Judge
from fullshard.faults.out_of_memory import Split, Stop
from fullshard.faults.replay import Together
from fullshard.faults.stragglers import Stragglers
from fullshard.faults.watch import Watch


def watch(
    settings: Guard, judge: Judge, saves: Any, progress: Progress, folder: Path, *, sample_ids: bool, collectives: Any
) -> Watch:
    """`saves` are those of the run; `sample_ids`: write those of every step to metrics.jsonl."""
    report = saves.report
    return Watch(
        settings=settings,
        progress=progress,
        folder=folder,
        is_main=report.world.is_main,
        warn=report.console.warn if report.world.is_main else report.console.debug,
        event=report.event,
        log_sample_ids=sample_ids,
        recent=judge.recent,
        recall=judge.recall,
        saves=saves,
        collectives=collectives,
    )


def memory(
    batch: Any, modules: Sequence[nn.Module], plan: Any, progress: Progress, report: Any, collectives: Any
) -> Stop:
    """What the section `batch` asks for if a rank runs out of memory; `plan` has the rows of a step."""
    if batch.on_oom == "stop" and batch.per_device != "auto":
        return Stop()
    group = collectives.host_group(report.world.timeout_s)
    together = Together(modules, collectives, group)
    if batch.on_oom == "stop":
        return Stop(together)
    return Split(
        together=together,
        progress=progress,
        asked=batch.per_device,
        share=plan.global_size // plan.world,
        warn=report.console.warn if report.world.is_main else report.console.debug,
        event=report.event,
    )


def stragglers(optimizer: torch.optim.Optimizer, world: World, report: Any, collectives: Any) -> Stragglers:
    """Times the updates of this optimizer; ranks tell each other where they are."""
    hosts = collectives.gather_objects(socket.gethostname())
    places = [f"GPU {rank % world.local_size}" if world.device.type == "cuda" else "CPU" for rank in range(world.size)]
    found = Stragglers(
        [f"Rank {rank} (host {host}, {places[rank]})" for rank, host in enumerate(hosts)],
        rank=world.rank,
        device=world.device,
        totals=lambda: report.meters.totals,
        warn=report.console.warn if world.is_main else report.console.debug,
        event=report.event,
        measured=report.limits.measured,
    )
    found.time_updates(optimizer)
    return found


__all__ = ["memory", "stragglers", "watch"]
