"""After ranks have failed: start all of them again, or stop, and why. Every node decides the same from the same facts.

A restart is a new set of processes with new addresses that resumes from the newest checkpoint. Must not know how ranks
are started, nor recipes.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fullshard.contracts.launcher import Ranks, Restarts
from fullshard.errors import EXIT_PREEMPTED, SetupError
from fullshard.explain.error_file import REPORTED_BY_LAUNCHER
from fullshard.faults.micro_batch import usual
from fullshard.faults.nodes import Ended
from fullshard.formatting.plural import counted

PAST, START = "FULLSHARD_RESTARTS", "FULLSHARD_START"
"""The variables with the restarts so far, as JSON, and with an id that all attempts of one start of the run share."""
_ENGINE = ("PET_MAX_RESTARTS", "TORCHELASTIC_MAX_RESTARTS")
_AGAIN = "Run the same command again to continue from the last checkpoint."


def allowed(asked: int | None, environ: Mapping[str, str] = os.environ) -> int:
    """How many restarts a run has: `topology.restarts`, or else what the engine that started this process says."""
    said = next((name for name in _ENGINE if environ.get(name, "").strip()), None)
    if asked is not None or said is None:
        return asked or 0
    if not environ[said].strip().isdigit():
        raise SetupError(f"{said}={environ[said]} is not a number of restarts. Unset it, or set topology.restarts.")
    return int(environ[said])


def unused(asked: int | None, environ: Mapping[str, str] = os.environ) -> list[str]:
    """A note for ranks that another launcher started, which restarts them or not."""
    if not asked or REPORTED_BY_LAUNCHER in environ or "RANK" not in environ:
        return []
    return [
        f"topology.restarts = {asked} is for ranks that fullshard starts. Another launcher started these, which "
        f"restarts them if you ask it to: torchrun --max-restarts {asked}."
    ]


@dataclass(frozen=True)
class Verdict:
    """What follows from the end of an attempt."""

    code: int
    lines: tuple[str, ...] = ()
    ranks: Ranks | None = None
    """The ranks to start next; None: the run has ended."""


@dataclass
class History:
    """The faults of a run so far, and what follows from the next one."""

    restarts: Restarts | None
    faults: list[Ended] = field(default_factory=list)
    start: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def attempt(self) -> int:
        """The number of the attempt, from 0."""
        return len(self.faults)

    @property
    def most(self) -> int:
        return self.restarts.most if self.restarts else 0

    def variables(self) -> dict[str, str]:
        """What the ranks of the next attempt are told."""
        past = [
            {"restart": number, "of": self.most, "why": told(fault), "rank": fault.rank, "failed_step": fault.step}
            for number, fault in enumerate(self.faults, 1)
        ]
        return {PAST: json.dumps(past), START: self.start}

    def judge(self, ends: Sequence[Ended], ranks: Ranks) -> Verdict:
        """Whether all ranks start again, from how those of every node ended."""
        mine, cause = ends[ranks.node_rank], _cause(ends)
        if cause.code == 0 or (mine.code == 0 and cause.lost):
            return Verdict(0)
        # What failed here has been reported.
        others = [end for end in ends if end.node != mine.node and (end is cause or end.lost)]
        elsewhere = tuple(f"{_upper(told(end, nodes=ranks.nodes))}." for end in others)
        if others and cause.code == EXIT_PREEMPTED:
            elsewhere = (f"A signal stopped the run, which saved if it could. {_AGAIN}",)
        if cause.is_final:
            return Verdict(cause.code, elsewhere)
        per_node = min(end.devices for end in ends)
        if (refusal := self._refusal(ends, cause, ranks, per_node)) is not None:
            return Verdict(cause.code, (*elsewhere, refusal) if refusal else elsewhere)
        again = self._again(cause, ranks, per_node)
        self.faults.append(cause)
        ids = ranks.device_ids[:per_node] if ranks.device_ids else None
        return Verdict(cause.code, (*elsewhere, again), replace(ranks, per_node=per_node, device_ids=ids))

    def _again(self, cause: Ended, ranks: Ranks, per_node: int) -> str:
        left, world = self.most - self.attempt - 1, per_node * ranks.nodes
        fewer = f" {_fewer(ranks, per_node)}" if per_node < ranks.per_node else ""
        which = f"All {world} ranks start" if world > 1 else "The rank starts"
        return (
            f"Restart {self.attempt + 1} of {self.most}: {told(cause, nodes=ranks.nodes)}.{fewer} {which} again from "
            f"the newest complete checkpoint; {counted(left, 'restart')} {'is' if left == 1 else 'are'} left."
        )

    def _refusal(self, ends: Sequence[Ended], cause: Ended, ranks: Ranks, per_node: int) -> str | None:
        """Why there is no restart; empty if nothing need be said, None if there is one."""
        if any(end.lost for end in ends):
            return (
                f"Run the same command again when all {ranks.nodes} nodes are there, or with --nodes on those that are "
                "left: it continues from the last checkpoint."
            )
        if not self.most:
            return ""
        if self.attempt >= self.most:
            return f"No restart is left: topology.restarts = {self.most}. {_AGAIN}"
        if earlier := self._same_place(cause):
            where = f"in step {cause.step:,}" if cause.step is not None else "before the first step"
            left = counted(self.most - self.attempt, "restart")
            return (
                f"This is the second failure {where} (the first one led to restart {earlier}), and a third try would "
                f"most likely end there too. The run stops, although {left} would be left. Find the cause first; the "
                "same command then continues from the last checkpoint."
            )
        if per_node < ranks.per_node and (problem := _does_not_fit(ranks.restarts, ranks.nodes * per_node)):
            return f"{_fewer(ranks, per_node)} The run cannot continue on those: {problem}"
        return None

    def _same_place(self, cause: Ended) -> int | None:
        """The number of the restart that an earlier failure in the same step led to. Starts that fail count only in a
        row: they need not have come equally far."""
        if cause.step is None:
            return len(self.faults) if self.faults and self.faults[-1].step is None else None
        return next((number for number, fault in enumerate(self.faults, 1) if fault.step == cause.step), None)


def _cause(ends: Sequence[Ended]) -> Ended:
    """The node to blame. One whose ranks have a reason of their own goes first, and those that only lost others last;
    ranks that ended well are no cause."""

    def order(end: Ended) -> int:
        if end.code == 0:
            return 5
        if end.is_final:
            return 0 if not end.stopped else 1
        return 4 if end.victim else 3 if end.lost else 2

    return min(ends, key=order)


def told(end: Ended, *, nodes: int = 1) -> str:
    """One end in words: which rank, where, what, in which step."""
    if end.lost:
        return f"node {end.node} (host {end.host}) {end.why}"
    place = f" on node {end.node} (host {end.host})" if nodes > 1 else ""
    step = f" in step {end.step:,}" if end.step is not None else " before its first step"
    who = f"rank {end.rank}{place}" if end.rank is not None else f"node {end.node} (host {end.host})"
    return f"{who} {end.why}{step if end.rank is not None else ''}"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _fewer(ranks: Ranks, per_node: int) -> str:
    every = " of every node" if ranks.nodes > 1 else ""
    return f"{counted(per_node, 'GPU')} of {ranks.per_node}{every} {'is' if per_node == 1 else 'are'} left."


def _does_not_fit(restarts: Restarts | None, world: int) -> str | None:
    """Why a run cannot continue on so many ranks; None: a step would have the same rows."""
    if world < 1 or restarts is None:
        return "no GPU is left. Check the driver and the log of the kernel."
    if restarts.rows is None:
        return (
            "batch.global is not set, so the rows of a step depend on the number of ranks. Set it, and a step has the "
            "same rows on any number of ranks."
        )
    if restarts.rows % (world * usual(restarts.per_device)):
        return (
            f"batch.global = {restarts.rows} is not a multiple of {counted(world, 'rank')} x batch.per_device = "
            f"{restarts.per_device}."
        )
    return None


def records(file: Path) -> Iterator[dict[str, Any]]:
    """The restarts of this run that its metrics do not have yet. Each is there once; resuming cuts the file."""
    past = json.loads(os.environ.get(PAST, "[]"))
    if not past:
        return
    start, written = os.environ.get(START), set()
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n") if file.exists() else ():
        if '"restart"' in line and str(start) in line:
            written.add(json.loads(line).get("restart"))
    for each in past:
        if each["restart"] not in written:
            yield {"kind": "event", "event": "restart", **each, "start": start}
