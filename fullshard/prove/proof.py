"""Runs a plan and compares each run with the one it must equal.

Must not know how runs are started, nor how the outcome is shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fullshard.checkpoint import folder as files
from fullshard.checkpoint.reader import open_tensors
from fullshard.prove.cases import KILLS, SAVE_EVERY, STEPS, Case, Plan
from fullshard.prove.compare import Outcome, Tolerance, compare_numbers, compare_samples, compare_tensors
from fullshard.prove.runs import RunFailed, Runs, taken
from fullshard.stages import hand_over

EXACT = Tolerance(exact=True)
NEAR = Tolerance(exact=False, losses=1e-6, norms=1e-4, updates=1e-2, moments=1e-3)
"""Sums over other ranks and splits round in a different order. Adam divides each gradient by its size, so rounding of a
small gradient changes a whole update: weights are compared relative to their updates, not to their own size."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one case."""

    name: str
    title: str
    within: Tolerance | None = None
    samples: Outcome | None = None
    numbers: Outcome | None = None
    tensors: Outcome | None = None
    remark: str | None = None
    """What the differences mean, if known."""
    failure: str | None = None
    """Why there was nothing to compare."""
    left_out: str | None = None
    """Why it was not run."""

    @property
    def drifts(self) -> list[str]:
        looks = (self.samples, self.numbers, self.tensors)
        found = [look.drift for look in looks if look is not None and look.drift]
        return [*found, self.remark] if found and self.remark else found

    @property
    def word(self) -> str:
        if self.left_out:
            return "left out"
        if self.failure:
            return "not run"
        if self.drifts:
            return "DRIFT"
        return "exact" if self.within is not None and self.within.exact else "equal"


def prove(plan: Plan, runs: Runs) -> list[Verdict]:
    """Runs every case of the plan. Raises RunFailed if the straight run fails."""
    if plan.straight.recipe.start:
        hand_over.request(plan.straight.folder)
    runs.make(plan.straight, plan.straight.title)
    verdicts = _started(plan.straight) if plan.straight.recipe.start else []
    verdicts += _resumed(plan.straight, plan.killed, runs) if plan.killed is not None else []
    failure = _failure(plan.reference, runs) if plan.reference is not None else None
    for case in plan.others:
        if why := failure or _failure(case, runs):
            verdicts.append(Verdict(case.name, case.title, NEAR, failure=why))
        else:
            verdicts.append(_compared(case, case.title, plan.reference or plan.straight, NEAR, step=STEPS))
        runs.remove(case)
    return [*verdicts, *(Verdict(name, name, left_out=why) for name, why in plan.left_out.items())]


def _started(straight: Case) -> list[Verdict]:
    """Whether the run started with what the earlier one wrote."""
    found = hand_over.look(straight.recipe)
    return [Verdict("start", found.title, EXACT, tensors=Outcome(found.word, found.drift))]


def _failure(case: Case, runs: Runs) -> str | None:
    """Makes a run; returns why it failed, if it did."""
    try:
        runs.make(case, case.title)
    except RunFailed as failed:
        return str(failed)
    return None


def _resumed(straight: Case, case: Case, runs: Runs) -> list[Verdict]:
    """Killed twice and resumed twice; compared with the straight run after each resume."""
    verdicts: list[Verdict] = []
    title = f"killed after step {KILLS[0]}"
    try:
        first = runs.kill(case, KILLS[0], title)
        title = f"killed after step {KILLS[0]}, resumed from {first}"
        second = runs.kill(case, KILLS[1], f"resumed from {first}, killed after step {KILLS[1]}")
        verdicts.append(_compared(case, title, straight, EXACT, step=second, resumed_from=first))
        title = f"killed after step {KILLS[1]}, resumed from {second}"
        runs.make(case, f"resumed from {second}")
        verdicts.append(_compared(case, title, straight, EXACT, step=STEPS, resumed_from=first))
    except RunFailed as failed:
        verdicts.append(Verdict("resume", title, EXACT, failure=str(failed)))
    runs.remove(case)
    return verdicts


def _compared(
    case: Case, title: str, against: Case, within: Tolerance, *, step: int, resumed_from: int | None = None
) -> Verdict:
    """Compares the logged steps and the checkpoint of `step` with those of another run."""
    found = taken(case)
    first = 1 if case.resume == "auto" else SAVE_EVERY + 1
    expected = taken(against, first=first, last=max(found.numbers, default=STEPS))
    samples, numbers = compare_samples(found, expected, within=within), compare_numbers(found, expected, within=within)
    ours, theirs = (open_tensors(run.folder / files.name_of(step)) for run in (case, against))
    before = None if within.exact else open_tensors(against.folder / files.name_of(SAVE_EVERY))
    tensors = compare_tensors(ours, theirs, within=within, step=step, before=before)
    begun = min((look.step for look in (samples, numbers) if look.step is not None), default=math.inf)
    remark = None
    if resumed_from is not None and begun <= resumed_from:
        remark = (
            f"step {begun} came before the first kill: already two runs of this recipe differ. Something in it is "
            "not deterministic: a custom part that reads the clock, or random numbers without a seed"
        )
    name = "resume" if within.exact else case.name
    return Verdict(name, title, within, samples, numbers, tensors, remark)
