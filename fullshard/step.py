"""One optimizer step over a list of micro-batches: count, backward, clip, update, average.

Gradients are sums divided by the count over all ranks and micro-batches, so a step is the same for any split.
Must not know time, logging, checkpoints or any concrete loss.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fullshard.contracts.objective import Batch, Objective, Terms
from fullshard.dist import reduce
from fullshard.dist.average import Average
from fullshard.dist.gradients import clip_global_norm, not_finite, one_by_one
from fullshard.dist.upload import to_device, upload
from fullshard.errors import SetupError
from fullshard.fast.run import within_step
from fullshard.faults.judge import SMALLEST_SCALE, Judge, Verdict, overflow, poisoned, update
from fullshard.faults.out_of_memory import Stop
from fullshard.proofs.first_update import FirstUpdate

LOGGED = {"kind", "step", "epoch", "loss", "lr", "grad_norm", "samples", "tokens", "seconds", "time"}
LOGGED |= {"data_wait", "mfu", "memory_gib", "host_memory_gib", "stage", "total_step"}
LOGGED |= {"loss_scale", "skipped_steps", "rollbacks"}
"""Keys of a logged step. No term, metric or number of an evaluation may have one of these names."""


@dataclass(frozen=True)
class Learner:
    """What a step needs to train the model."""

    model: nn.Module
    objective: Objective
    aux: dict[str, nn.Module]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    clip: float | None
    first_update: FirstUpdate
    average: Average | None
    guard: Judge
    memory: Stop
    device: torch.device


@dataclass(frozen=True)
class StepResult:
    """The result of a step: tensors that are still on the device, so that the host does not wait."""

    sums: dict[str, torch.Tensor]
    """(sum, count) of the loss and each metric over this rank's micro-batches; zeros if the guard left out the step."""
    loss: torch.Tensor
    """Of the step; the sum over ranks is the whole."""
    grad_norm: torch.Tensor
    skipped: bool
    """The scaler found an overflow and skipped the update."""
    flags: reduce.HostCopy
    """How many ranks raised each flag, then the verdict. Flags are summed with the counts: no extra collective."""


def train_step(
    learner: Learner,
    batches: Sequence[Batch],
    *,
    lr_factor: float,
    flags: Sequence[bool] = (),
    before_update: Callable[[], None] = lambda: None,
) -> StepResult:
    """Runs the micro-batches, then one update. Every rank brings the same number of micro-batches.

    `before_update` lets a save in the background finish copying the tensors that the update changes."""
    model, optimizer, scaler, device = learner.model, learner.optimizer, learner.scaler, learner.device
    if not model.training:  # `train` visits every module
        model.train()
    learner.guard.begin()
    counts = count_terms(learner.objective, batches)
    agreed = reduce.sum_over_ranks(upload(torch.tensor([float(n) for n in (*counts.values(), *flags)]), device))
    totals = agreed[: len(counts)].clamp(min=1.0)
    total = totals[0] if is_single(counts) else totals
    scale = scaler.scale if scaler else lambda loss: loss

    def passes(batches: Sequence[Batch]) -> list[Terms]:
        on_device = (to_device(batch, device) for batch in one_by_one(model, batches))
        return learner.objective.backward(model, on_device, total, learner.aux, lambda loss: scale(poisoned(loss)))

    with within_step(model, optimizer):
        terms: list[Terms] = learner.memory.passes(passes, batches)
    _check_names(learner.objective, terms, counts)
    if scaler:
        scaler.unscale_(optimizer)
    grad_norm = clip_global_norm(optimizer, ceiling=learner.clip, scaled=scaler is not None)
    loss = torch.stack([t.over(total).double() for t in terms]).sum()
    verdict = learner.guard.judge(grad_norm, lambda: reduce.sum_over_ranks(loss.clone()), scaled=scaler is not None)
    found = reduce.HostCopy(torch.cat([agreed[len(counts) :], verdict.numbers]))
    _set_learning_rates(optimizer, lr_factor)
    before_update()
    learner.first_update.remember()
    skipped = learner.memory.update(lambda: _update(optimizer, scaler, verdict), optimizer)
    if not skipped:
        learner.first_update.prove(lambda: learner.guard.forgives(verdict))
        if learner.average:
            learner.average.update(verdict.bad)
    elif scaler and scaler.get_scale() < SMALLEST_SCALE:
        raise overflow(scaler.get_scale(), not_finite(model))
    optimizer.zero_grad(set_to_none=True)
    sums = sum_terms(terms, counts, device)
    if not is_single(counts):
        # Each rank has its share of the step's loss, and the average over ranks must be the whole loss.
        sums["loss"] = torch.stack([loss * reduce.place()[0], torch.ones_like(loss)])
    sums = {name: verdict.whole(pair) for name, pair in sums.items()}
    return StepResult(sums, loss, grad_norm, skipped, found)


def count_terms(objective: Objective, batches: Sequence[Batch]) -> dict[str, int]:
    """How many values each term sums over the micro-batches, sorted by name; a single term is called `loss`."""
    counted = [objective.count(batch) for batch in batches]
    each = [dict(count) if isinstance(count, Mapping) else {"loss": count} for count in counted]
    if isinstance(counted[0], Mapping):
        refuse_logged(f"objective.kind = {objective.kind()}: a term", each[0])
    if not all(count.keys() == each[0].keys() for count in each):
        raise SetupError(
            f"objective.kind = {objective.kind()}: count() names {', '.join(each[0])} for one micro-batch and other "
            "terms for another. Return every name each time, with 0 where a micro-batch has no such term."
        )
    return {name: sum(count[name] for count in each) for name in sorted(each[0])}


def refuse_logged(what: str, names: Iterable[str]) -> None:
    """Raises if a name would replace a number that every log has."""
    if found := sorted(LOGGED & set(names)):
        raise SetupError(f"{what} is called {found[0]}, which every log has already. Rename it.")


def _check_names(objective: Objective, terms: Sequence[Terms], counts: Mapping[str, int]) -> None:
    refuse_logged(f"objective.kind = {objective.kind()}: a metric", terms[0].metrics)
    expected = set() if is_single(counts) else set(counts)
    for found in (set(t.named) for t in terms):
        if found != expected:
            names = [", ".join(sorted(each)) or "one term without a name" for each in (found, expected)]
            raise SetupError(
                f"objective.kind = {objective.kind()}: loss() returns {names[0]}, and count() counts {names[1]}. "
                "Both must name the same terms."
            )


def is_single(counts: Mapping[str, int]) -> bool:
    """Whether the objective has a single term without a name."""
    return list(counts) == ["loss"]


def _set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        lr = group["initial_lr"] * factor
        # A compiled update keeps its rate in a tensor, which must stay the same object.
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _update(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, verdict: Verdict) -> bool:
    """Updates the weights, unless the verdict is bad; True if the scaler skipped the update because of an overflow."""
    if scaler is None:
        update(optimizer, verdict)
        return False
    before = scaler.get_scale()
    if not verdict.bad:
        scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() < before


def sum_terms(terms: Sequence[Terms], counts: Mapping[str, int], device: torch.device) -> dict[str, torch.Tensor]:
    """(sum, count) of each term and metric over micro-batches, in fp64: the order of addition does not matter."""
    sums = {}
    for name, count in counts.items():
        each = [t.named[name].sum if t.named else t.loss_sum for t in terms]
        total = torch.stack([part.double() for part in each]).sum()
        sums[name] = torch.stack([total, upload(torch.tensor(float(count), dtype=torch.float64), device)])
    for name in terms[0].metrics:
        pairs = [torch.stack([part.double() for part in t.metrics[name]]) for t in terms]
        sums[name] = torch.stack(pairs).sum(0)
    return sums


def seed_everything(*key: int) -> None:
    """Seeds every generator from (seed, step, rank): randomness follows from the step, so nothing needs saving."""
    words = np.random.SeedSequence(key).generate_state(2)
    seed = int(words[0]) << 32 | int(words[1])
    random.seed(seed)
    np.random.seed(int(words[0]))
    torch.manual_seed(seed)
