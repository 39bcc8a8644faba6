"""The list of fault drills: what happens to a run, how it recovers, and the words that must explain it.

Must not start anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fullshard.drills.fault import Where

Recovery = Literal["restart", "rerun", "skip", "retry"]
"""By the launcher; by running the same command again, as after a save that failed: a restart would not help; by leaving
out one update; by trying the save again in the same run."""
TIMEOUT_S = 30.0
"""After which a rank that waits for another gives up, or the time of the run without faults if that is longer."""
STEP, STEPS, SAVE_EVERY = 3, 6, 2
"""A fault happens in the step after this one: between two checkpoints."""
STORE = "file://{folder}/store"
"""The store of the drills that need one, in the folder of the runs."""
NOT_TRIED = "Not tried here, since a machine cannot do it to itself: a lost node, a cut network, a clock that is set."


@dataclass(frozen=True)
class Happens:
    """One fault of one rank."""

    what: str
    where: Where
    after: int = STEP
    rank: int | None = None
    """None: the last one, which holds no part of the run that the others lack."""


@dataclass(frozen=True)
class Drill:
    """One kind of fault."""

    name: str
    title: str
    faults: tuple[Happens, ...] = ()
    says: tuple[str, ...] = ()
    """Patterns that the run's output must match, each as often as it is here: the explanations."""
    recovery: Recovery = "restart"
    waits: bool = False
    """Nothing ends by itself: the other ranks wait for the timeout."""
    to_launcher: bool = False
    """The launcher itself is killed, from outside."""
    settings: tuple[tuple[str, Any], ...] = ()
    """What the drill changes in the recipe, as dotted keys."""


_PLACES: dict[Where, str] = {
    "data": "while it waits for data",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "update": "in the optimizer's update",
    "save": "in a save",
    "evaluate": "in an evaluation",
}
_KILLED = r"[Rr]ank {last}\b.*(killed|SIGKILL)"
_RAISED = r"DrillError: This error is part of a fault drill"
_FULL = r"(File too large|No space left)"
_STOPPED = r"Rank {last} is stopped \(process \d+, by SIGSTOP"
_WAITED_FOR = r"Rank {last} keeps the others waiting"
_MISMATCH = r"(distributed collective mismatch|in different collectives|tensors of different shapes)"
"""gloo's own words, or those about the hang."""


def _everywhere(
    what: str, happens: str, says: str, *, in_save: Recovery = "restart", waits: bool = False
) -> list[Drill]:
    return [
        Drill(
            f"{what}-{where}",
            f"{happens} {place}",
            (Happens(what, where),),
            (says,),
            in_save if where == "save" else "restart",
            waits,
        )
        for where, place in _PLACES.items()
    ]


def _once(what: str, where: Where, title: str, says: str, **more: Any) -> Drill:
    return Drill(f"{what.replace('_', '-')}-{where}", title, (Happens(what, where),), (says,), **more)


DRILLS: tuple[Drill, ...] = (
    *_everywhere("killed", "a rank is killed (SIGKILL)", _KILLED),
    *_everywhere("exception", "a rank raises an error", _RAISED, in_save="rerun"),
    _once("exits", "forward", "a rank exits silently", r"exit code 7"),
    _once("out_of_memory", "forward", "a rank runs out of memory", r"(out of memory|can't allocate memory)"),
    *_everywhere("stopped", "a rank is stopped (SIGSTOP)", _STOPPED, waits=True),
    _once("hangs", "data", "a rank hangs while it waits for data", r"Rank {last} is in the data loader", waits=True),
    _once("hangs", "backward", "a rank hangs while the others wait in a collective", _WAITED_FOR, waits=True),
    _once("hangs_holding_the_gil", "forward", "a rank hangs in C and holds the GIL", _WAITED_FOR, waits=True),
    _once("other_collective", "evaluate", "a rank calls a collective that the others do not", _MISMATCH),
    _once(
        "not_a_number",
        "backward",
        "a gradient of one rank is NaN",
        r"gradient norm\s+nan;",
        recovery="skip",
        settings=(("guard.not_finite", "skip"),),
    ),
    _once("disk_full", "save", "the disk is full in a save of a rank", _FULL, recovery="rerun"),
    _once(
        "store_gone",
        "save",
        "the store of checkpoints is gone for a moment in a save",
        r"The store is gone.*Trying again in \d+ s",
        recovery="retry",
        settings=(("checkpoint.store", STORE), ("checkpoint.format", "sharded")),
    ),
    _once(
        "worker_killed",
        "data",
        "a data worker of a rank is killed",
        r"(worker \(pid \d+\) is killed|A data loader process died)",
        settings=(("data.workers", 1),),
    ),
    Drill(
        "launcher-killed",
        "the launcher is killed (SIGKILL)",
        says=(r"The launcher \(process \d+\) is gone",),
        recovery="rerun",
        to_launcher=True,
    ),
    Drill(
        "two-in-a-row",
        "a rank is killed, and after the restart it raises an error",
        (Happens("killed", "forward"), Happens("exception", "backward", after=STEP + 2)),
        (_KILLED, _RAISED),
    ),
    Drill(
        "during-the-restart",
        "a rank is killed, and again while it restarts",
        (Happens("killed", "forward"), Happens("killed", "start")),
        (_KILLED, _KILLED),
    ),
)


def in_one_run(name: str, drills: Sequence[Drill], *, after: Sequence[int] | None = None) -> Drill:
    """Several drills as one run, which restarts after each: a fault every second step or after those given, each with
    its own words."""
    steps = after or range(STEP, STEP + 2 * len(drills), 2)
    faults = tuple(replace(drill.faults[0], after=step) for drill, step in zip(drills, steps, strict=True))
    says = tuple(each for drill in drills for each in drill.says)
    return Drill(name, "; ".join(drill.title for drill in drills), faults, says)


def to_rank(drill: Drill, rank: int) -> Drill:
    """The same, with its faults on this rank."""
    faults = tuple(replace(fault, rank=rank) for fault in drill.faults)
    return replace(drill, faults=faults, says=tuple(each.replace("{last}", str(rank)) for each in drill.says))


def chosen(names: str | None) -> tuple[Drill, ...]:
    """The drills that a comma-separated list names, or all."""
    from fullshard.config.part import did_you_mean
    from fullshard.errors import RecipeError

    known = {drill.name: drill for drill in DRILLS}
    asked = [name.strip() for name in names.split(",")] if names is not None else list(known)
    for name in asked:
        if name not in known:
            raise RecipeError(
                f"--cases {names}: {name!r} is not a fault{did_you_mean(name, list(known))}: {', '.join(known)}."
            )
    return tuple(known[name] for name in asked)
