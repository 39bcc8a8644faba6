"""The loop: step until done; when to log, validate, save and stop.

One loop for every objective. Every decision follows from numbers that are the same on all ranks.
Must not know FSDP, losses, file formats or recipes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, refuse_same_name
from fullshard.contracts.progress import Progress, Result, Steps
from fullshard.control import best
from fullshard.control.best import BestRule
from fullshard.control.saves import Saves
from fullshard.control.triggers import Due
from fullshard.dist import reduce
from fullshard.faults.stragglers import Stragglers
from fullshard.faults.watch import Watch
from fullshard.log.report import Report
from fullshard.step import Learner, StepResult, refuse_logged, seed_everything, train_step


@dataclass(frozen=True)
class Validation:
    """What is evaluated, when, and what follows from it."""

    evaluations: Sequence[Evaluation]
    inputs: EvaluationInputs
    due: Due
    best: BestRule | None
    patience: int | None
    own_code: bool
    """Whether an evaluation is a user's own, which may raise when it first runs."""


@dataclass(frozen=True)
class Parts:
    """The parts of a run, made by build.py. They are not replaced while it runs."""

    learner: Learner
    lr: float
    lr_factor: Callable[[int, int], float]
    """The schedule: the factor of the learning rate at a step, of all steps."""
    windows: Callable[[int, Collection[int]], Iterator[Any]]
    """The micro-batches of each step, from a step on, without windows that are left out."""
    steps_per_epoch: int
    total_steps: int
    validation: Validation
    saves: Saves
    report: Report
    log_every: int
    progress: Progress
    """How far the run is; a checkpoint keeps it."""
    watch: Watch
    """What to do about steps with NaN, Inf or a loss spike."""
    stragglers: Stragglers
    rank: int
    seed: int
    folder: Path


@dataclass
class State:
    """What the loop itself keeps from step to step, and no checkpoint does."""

    stop_asked: Callable[[], bool]
    """Whether this process was asked to stop."""
    begun: int
    """The step at which this process started."""
    pending: dict[str, torch.Tensor] = field(default_factory=dict)
    """(sum, count) of the loss and each metric that are still on the device."""
    last: StepResult | None = None
    stop: bool = False
    """Some rank was asked to stop."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Of the last validation."""
    evaluated: bool = False
    """The evaluations have run once."""


def fit(parts: Parts, *, stop_asked: Callable[[], bool]) -> Result:
    """Trains until the last step, the end of patience, or until some rank is asked to stop."""
    progress, saves, state = parts.progress, parts.saves, State(stop_asked, parts.progress.step)
    saves.begin(progress.step)
    if parts.validation.due.at_start and progress.step == 0:
        _judge(parts, state, _evaluate(parts, state))
    stopped = parts.watch.until_done(lambda: _epochs(parts, state))
    if saves.step != progress.step and (saves.at_end or stopped == "signal"):
        _save(parts, state)
    saves.settle()
    if progress.finished:
        _at_end(parts, state, progress.seconds)
    return progress.result(parts.folder, validation=state.numbers, stopped=stopped)


def _epochs(parts: Parts, state: State) -> str:
    """Trains from where progress is; returns why it ended."""
    progress, windows = parts.progress, parts.windows(parts.progress.step, parts.watch.left_out)
    parts.report.console.run_begin(parts.total_steps, done=progress.step)
    state.pending.clear()
    stopped = "done" if progress.settled else _settle(parts, state)
    while progress.step < parts.total_steps and stopped == "done":
        stopped = _epoch(parts, state, windows)
        progress.seconds = parts.report.meters.seconds
    return stopped


def _epoch(parts: Parts, state: State, windows: Iterator[Any]) -> str:
    """One epoch, or what is left of it; returns why it ended."""
    progress, begun = parts.progress, time.monotonic()
    epoch, done = divmod(progress.step, parts.steps_per_epoch)
    last = min(parts.steps_per_epoch, done + parts.total_steps - progress.step)
    steps = Steps(done, last, parts.steps_per_epoch)
    epochs = math.ceil(parts.total_steps / parts.steps_per_epoch)
    with parts.report.epoch(epoch + 1, epochs, parts.lr * _lr_factor(parts), steps):
        for number in range(done + 1, last + 1):
            parts.learner.memory.step(lambda: _step(parts, state, windows))
            if progress.step % parts.log_every == 0 or progress.step == 1 or number == last:
                _log(parts, state)
            else:
                parts.report.advance()
            if state.stop:
                progress.settled = False
                return "signal"
            if number < last and (stopped := _after_step(parts, state)) != "done":
                return stopped
    return _after_epoch(parts, state, epoch + 1, steps, seconds=time.monotonic() - begun)


def _step(parts: Parts, state: State, windows: Iterator[Any]) -> None:
    progress, saves = parts.progress, parts.saves
    with parts.report.phase("data", progress.step):
        window = next(windows)
    with parts.stragglers.step(), parts.report.phase("compute"):
        seed_everything(parts.seed, progress.step, parts.rank)
        result = train_step(
            parts.learner,
            window.batches,
            lr_factor=_lr_factor(parts),
            flags=(state.stop_asked(), *saves.flags(progress.step)),
            before_update=saves.saver.finish_copy,
        )
    for name, pair in result.sums.items():
        state.pending[name] = state.pending[name] + pair if name in state.pending else pair
    progress.step += 1
    progress.schedule_step += not result.skipped
    progress.samples += window.num_samples
    progress.tokens += window.num_tokens
    parts.report.meters.step(
        samples=window.num_samples, tokens=window.num_tokens, quantities=window.quantities, **window.numbers
    )
    # The flags of the step before: reading this step's would make the host wait for the device.
    with parts.stragglers.waiting():
        state.stop, failed, overdue, near = parts.watch.heed()
    saves.follow(progress.step, failed=failed, overdue=overdue, near=near)
    parts.watch.trained(window, result)
    state.last = result


def _lr_factor(parts: Parts) -> float:
    return parts.lr_factor(parts.progress.schedule_step, parts.total_steps)


def _flush(parts: Parts, state: State) -> float:
    """Adds the sums on the device, over all ranks, to those of progress; the host waits. Returns the unlogged loss."""
    progress, names, pairs = parts.progress, sorted(state.pending), []
    with parts.report.phase("compute"):
        parts.watch.heed()
        if names:
            rows = parts.stragglers.beside(torch.stack([state.pending[name] for name in names]))
            pairs = parts.stragglers.compare(reduce.sum_over_ranks(rows).tolist(), step=progress.step)
    state.pending.clear()
    for name, (total, count) in zip(names, pairs, strict=True):
        for sums in (progress.epoch_sums, progress.unlogged):
            before = sums.get(name, [0.0, 0.0])
            sums[name] = [before[0] + total, before[1] + count]
    return _average(progress.unlogged, "loss")


def _average(sums: dict[str, list[float]], name: str) -> float:
    total, count = sums.get(name, [0.0, 0.0])
    return total / max(count, 1)


def _log(parts: Parts, state: State) -> None:
    assert state.last is not None
    progress = parts.progress
    loss, grad_norm = _flush(parts, state), float(state.last.grad_norm)
    loss = loss if progress.unlogged["loss"][1] else math.nan  # every step since the last line was left out
    averages = {name: _average(progress.unlogged, name) for name in progress.unlogged if name != "loss"}
    progress.unlogged = {}
    parts.report.log(
        step=progress.step,
        epoch=_epochs_done(parts),
        loss=loss,
        lr=float(parts.learner.optimizer.param_groups[0]["lr"]),
        grad_norm=grad_norm,
        **averages,
        **parts.watch.counts(parts.learner.scaler),
    )


def _epochs_done(parts: Parts) -> float:
    return round(parts.progress.step / parts.steps_per_epoch, 4)


def _settle(parts: Parts, state: State) -> str:
    """Does what was due after the step at which the earlier run stopped."""
    progress = parts.progress
    progress.settled = True
    if progress.step % parts.steps_per_epoch and progress.step < parts.total_steps:
        return _after_step(parts, state)
    epoch = math.ceil(progress.step / parts.steps_per_epoch)
    done = progress.step - (epoch - 1) * parts.steps_per_epoch
    return _after_epoch(parts, state, epoch, Steps(0, done, parts.steps_per_epoch), seconds=0.0)


def _after_step(parts: Parts, state: State) -> str:
    """What is due within an epoch; after its last step `_after_epoch` takes over."""
    stopped, keep = "done", False
    if parts.validation.due.after_step(parts.progress.step):
        stopped, keep = _judge(parts, state, _evaluate(parts, state))
    if keep or parts.saves.due_after(parts.progress.step) or stopped != "done":
        _save(parts, state, best=keep)
    return stopped


def _after_epoch(parts: Parts, state: State, epoch: int, steps: Steps, *, seconds: float) -> str:
    """What is due at the end of an epoch, or of a run that ends within one."""
    progress, due = parts.progress, parts.validation.due
    _flush(parts, state)
    train_loss = _average(progress.epoch_sums, "loss")
    ended = progress.step >= parts.total_steps
    numbers: dict[str, float] = {}
    if due.after_epoch(epoch) or due.after_step(progress.step) or ended:
        numbers = _evaluate(parts, state)
    parts.report.console.epoch_end(
        epoch, seconds=seconds, train_loss=train_loss, val_loss=numbers.get("loss"), steps=steps
    )
    stopped, keep = _judge(parts, state, numbers)
    if progress.step % parts.steps_per_epoch == 0:
        progress.epoch, progress.epoch_sums = epoch, {}
    progress.finished = ended or stopped == "patience"
    if keep or parts.saves.due_after(progress.step, epoch) or (progress.finished and parts.saves.at_end):
        _save(parts, state, best=keep)
    return stopped


def _evaluate(parts: Parts, state: State, *, at_end: bool = False) -> dict[str, float]:
    """Runs the evaluations that belong here and reports what they find."""
    numbers: dict[str, float] = {}
    texts: list[str] = []
    owners: dict[str, str] = {}
    if parts.validation.own_code and not state.evaluated and not at_end:
        _save_unsettled(parts, state)
    state.evaluated = True
    parts.learner.model.eval()
    with parts.report.phase("evaluate"):
        for evaluation in parts.validation.evaluations:
            if evaluation.only_at_end == at_end:
                found = evaluation.run(parts.validation.inputs)
                refuse_logged(f"evaluate.parts: a number of {evaluation.kind()}", found.numbers.keys() - {"loss"})
                refuse_same_name(owners, f"evaluate.parts: {evaluation.kind()}", found.numbers)
                numbers |= found.numbers
                texts += found.texts
    state.numbers = state.numbers | numbers
    parts.report.validation(numbers, texts, step=parts.progress.step, epoch=_epochs_done(parts))
    return numbers


def _judge(parts: Parts, state: State, numbers: dict[str, float]) -> tuple[str, bool]:
    """Whether to stop, and whether to keep this model as the best; the numbers are the same on every rank."""
    rule, progress = parts.validation.best, parts.progress
    if rule is None or not numbers:
        return "done", False
    if rule.metric not in numbers:
        saved = None
        if progress.step:
            progress.settled = False  # the resumed run judges again
            _save(parts, state)
            parts.saves.settle()
            saved = f"The model of step {progress.step} is saved"
        raise best.not_found(rule, numbers, saved=saved)
    patience, console = parts.validation.patience, parts.report.console
    return best.judge(rule, progress, numbers[rule.metric], patience=patience, console=console)


def _save(parts: Parts, state: State, *, best: bool = False) -> None:
    _flush(parts, state)  # the guard sees every step first, so no checkpoint holds NaN or Inf
    parts.watch.remember()
    parts.saves.save(parts.progress, best=best)


def _save_unsettled(parts: Parts, state: State) -> None:
    """Saves steps that an error in the evaluation to come would lose; a run resumed from there evaluates first."""
    if parts.progress.step > max(parts.saves.step, state.begun):
        parts.progress.settled = False
        _save(parts, state)
        parts.progress.settled = True


def _at_end(parts: Parts, state: State, seconds: float) -> None:
    exported, rule, progress = parts.saves.export(parts.progress), parts.validation.best, parts.progress
    _evaluate(parts, state, at_end=True)
    rows = [("best", best.outcome(rule, progress)), ("model", exported), ("run folder", str(parts.folder))]
    if rule and (line := best.only_worse(rule, progress)):
        rows.insert(0, ("warning", line))
    rows[1:1] = parts.watch.summary()
    parts.report.console.finished(seconds, rows)
