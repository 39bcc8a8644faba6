"""Compares two runs: the samples and numbers of each step, and the tensors of their checkpoints.

Names the first step and the tensor that differ. Must not know which runs these are, nor how they were made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

NUMBERS = ("loss", "grad_norm", "lr", "loss_scale")
"""What must be equal in each step, if a run logs it."""


@dataclass(frozen=True)
class Tolerance:
    """How close two runs must be."""

    exact: bool
    """Bit for bit, and samples in the same order."""
    losses: float = 0.0
    """How far losses may be apart in the first three steps, relative to their size; ten times as far later, since every
    update carries the rounding of the previous one forward."""
    norms: float = 0.0
    """The same for gradient norms."""
    updates: float = 0.0
    """The norm of the difference of a weight tensor, relative to how far the last updates moved it."""
    moments: float = 0.0
    """The norm of the difference of a first moment, relative to its norm."""

    def allows(self, name: str, step: int) -> float:
        """How far a number of a step may be off."""
        if self.exact:
            return 0.0
        return self.norms if name == "grad_norm" else self.losses * (1 if step <= 3 else 10)


@dataclass(frozen=True)
class Outcome:
    """One comparison of two runs: a word for the table, and a sentence about the drift, if any."""

    word: str
    drift: str | None = None
    worst: float = 0.0
    """The largest relative difference."""
    step: int | None = None
    """The first step that differs."""
    tensor: str | None = None
    """The tensor that differs most."""


@dataclass
class Steps:
    """What a run logged of each step."""

    samples: dict[int, list[int]] = field(default_factory=dict)
    numbers: dict[int, dict[str, float | None]] = field(default_factory=dict)


def steps_of(records: Iterable[Mapping[str, Any]], *, first: int = 1, last: int | None = None) -> Steps:
    """The steps in the records of metrics.jsonl, from `first` up to `last`."""
    steps = Steps()
    for record in records:
        step = record.get("step")
        if not isinstance(step, int) or step < first or (last is not None and step > last):
            continue
        if record.get("event") == "samples":
            steps.samples[step] = list(record["sample_ids"])
        elif record.get("kind") == "train":
            steps.numbers[step] = {name: record[name] for name in NUMBERS if name in record}
    return steps


def compare_samples(found: Steps, expected: Steps, *, within: Tolerance) -> Outcome:
    """Whether each step read the right samples; on other ranks, only their order within the step may differ."""
    for step, ids in sorted(expected.samples.items()):
        other = found.samples.get(step)
        if other is None:
            return Outcome("missing", f"step {step} is missing", math.inf, step)
        if sorted(other) != sorted(ids):
            wrong, right = sorted(set(other) - set(ids)), sorted(set(ids) - set(other))
            if not wrong and not right:
                return Outcome(f"step {step}", f"step {step} reads some samples twice", math.inf, step)
            text = f"step {step} reads the wrong samples: {_some(wrong)} instead of {_some(right)}"
            return Outcome(f"step {step}", text, math.inf, step)
        if within.exact and other != ids:
            return Outcome(f"step {step}", f"step {step} reads its samples in a different order", math.inf, step)
    return Outcome("same")


def compare_numbers(found: Steps, expected: Steps, *, within: Tolerance) -> Outcome:
    """Losses, gradient norms and rates of each step; names the first step outside the tolerance."""
    worst = 0.0
    for step, numbers in sorted(expected.numbers.items()):
        others = found.numbers.get(step)
        if others is None:
            return Outcome("missing", f"step {step} is missing", math.inf, step)
        for name, value in numbers.items():
            other = others.get(name)
            apart = _apart(other, value)
            worst = max(worst, apart) if name == "loss" or within.exact else worst
            if apart > within.allows(name, step):
                allowed = "bitwise" if within.exact else f"{within.allows(name, step):.0e}"
                text = f"step {step} has {_NAMES[name]} {other!r} instead of {value!r}"
                return Outcome(f"step {step}", f"{text} (off by {apart:.1e}, allowed: {allowed})", apart, step)
    return Outcome("bitwise" if worst == 0.0 else f"{worst:.0e}", worst=worst)


_NAMES = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate", "loss_scale": "loss scale"}


def _apart(found: float | None, expected: float | None) -> float:
    """The relative difference; None equals only None."""
    if found is None or expected is None:
        return 0.0 if found is expected else math.inf
    return abs(found - expected) / abs(expected) if expected else (0.0 if found == expected else math.inf)


def _some(ids: Sequence[int], most: int = 4) -> str:
    shown = ", ".join(str(i) for i in ids[:most]) or "none"
    return f"{shown} and {len(ids) - most} more" if len(ids) > most else shown


class Tensors(Protocol):
    """The tensors of a checkpoint."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, start: int, stop: int) -> torch.Tensor: ...


def compare_tensors(
    found: Tensors, expected: Tensors, *, within: Tolerance, step: int, before: Tensors | None = None
) -> Outcome:
    """Every weight and optimizer tensor bit for bit; or, within a tolerance, weights and first moments with gradients
    above noise. `before` has the expected weights of some updates earlier."""
    names = sorted(name for name in expected.names() if within.exact or name.startswith("model/") or _is_moment(name))
    missing = sorted(expected.names() - found.names())
    surplus = sorted(found.names() - expected.names())
    if missing or surplus:
        what = f"lacks {len(missing)} of {len(expected.names())}" if missing else f"has {len(surplus)} too many"
        name = (missing or surplus)[0]
        text = f"the checkpoint of step {step} {what} tensors, first {name}"
        return Outcome("names", text, math.inf, step, name)
    floor = 0.0 if within.exact else _floor(expected)
    apart = {name: _tensor_apart(found, expected, name, within=within, floor=floor, before=before) for name in names}
    allowed = {name: 0.0 if within.exact else within.moments if _is_moment(name) else within.updates for name in names}
    beyond = [name for name in names if apart[name] > allowed[name]]
    worst = max(beyond or apart, key=lambda name: apart[name], default="")
    largest = apart.get(worst, 0.0)
    if not beyond:
        return Outcome(f"{largest:.0e}" if largest else "bitwise", worst=largest)
    text = f"after step {step}, {len(beyond)} of {len(names)} tensors differ, most {worst}"
    limit = "bitwise" if within.exact else f"{allowed[worst]:.0e}{'' if _is_moment(worst) else ' of the last updates'}"
    return Outcome(f"{len(beyond)} differ", f"{text} (off by {largest:.1e}, allowed: {limit})", largest, step, worst)


NOISE = 1e-5
"""Gradients smaller than this share of the usual ones are rounding noise: that of an attention key bias, for example,
which softmax ignores. Adam turns them into full updates, which differ whenever sums round in a different order; they do
not affect losses."""


def _is_moment(name: str) -> bool:
    return name.startswith("optimizer/") and name.endswith("/exp_avg")


def _second(tensors: Tensors, name: str) -> torch.Tensor | None:
    """Adam's second moment of a weight or of its first moment; None for another optimizer or a frozen weight."""
    bare = name.removeprefix("model/") if name.startswith("model/") else name[len("optimizer/") : -len("/exp_avg")]
    key = f"optimizer/{bare}/exp_avg_sq"
    return _read(tensors, key).double().reshape(-1) if key in tensors.names() else None


def _floor(tensors: Tensors) -> float:
    """The second moment below which a gradient is noise, from the median over tensors."""
    means = [_second(tensors, name) for name in tensors.names() if name.startswith("model/")]
    usual = sorted(float(mean.mean()) for mean in means if mean is not None)
    return usual[len(usual) // 2] * NOISE**2 if usual else 0.0


def _tensor_apart(
    found: Tensors,
    expected: Tensors,
    name: str,
    *,
    within: Tolerance,
    floor: float = 0.0,
    before: Tensors | None = None,
) -> float:
    """The norm of the difference; of a moment relative to its norm, of a weight to that of its last updates. Infinite
    if they cannot be subtracted."""
    import torch

    if found.shape(name) != expected.shape(name) or found.dtype(name) != expected.dtype(name):
        return math.inf
    ours, theirs = _read(found, name).reshape(-1), _read(expected, name).reshape(-1)
    if torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
        return 0.0
    earlier = None
    if before is not None and not within.exact and not _is_moment(name) and name in before.names():
        earlier = _read(before, name).reshape(-1)
    second = _second(expected, name) if floor else None
    if second is not None:
        learned = second >= max(floor, float(second.mean()) * NOISE**2)
        ours, theirs = ours[learned], theirs[learned]
        earlier = None if earlier is None else earlier[learned]
    difference = _distance(ours, theirs)
    if difference == 0.0:
        return 5e-324 if within.exact else 0.0  # zeros of opposite sign
    size = _distance(theirs, torch.zeros(()))
    if earlier is not None:
        # Updates below the last digit of a weight are rounding errors themselves.
        rounding = LAST_DIGITS * torch.finfo(theirs.dtype).eps * size if theirs.is_floating_point() else 0.0
        size = max(_distance(theirs, earlier), rounding / within.updates)
    apart = difference / size if size else math.inf
    return math.inf if math.isnan(apart) else apart


LAST_DIGITS = 4
"""Rounding of weights that is always allowed, in units of their last digit."""


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The norm of the difference in fp64, piece by piece."""
    others = theirs.expand_as(ours)
    pairs = zip(ours.split(_PIECE), others.split(_PIECE), strict=True)
    return math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in pairs))


_PIECE = 2**24
"""Elements compared at a time, in fp64."""


def _read(tensors: Tensors, name: str) -> torch.Tensor:
    return tensors.read(name, 0, (tensors.shape(name) or (1,))[0])
