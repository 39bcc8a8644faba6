"""The loop: step until done; when to log, validate, save and stop.

One loop for every objective. Every decision follows from numbers that are the same on all ranks.
Must not know FSDP, losses, file formats or recipes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.saver import Saver
from fullshard.contracts.evaluation import Evaluation, EvaluationInputs
from fullshard.contracts.objective import Objective
from fullshard.contracts.progress import Progress, Result
from fullshard.contracts.schedule import Schedule
from fullshard.control import best
from fullshard.control.averages import average, flush
from fullshard.control.best import BestRule
from fullshard.control.next_save import Approach
from fullshard.control.triggers import Due
from fullshard.dist import reduce
from fullshard.dist.world import peaks
from fullshard.errors import NumericalError
from fullshard.formatting.readable import Steps
from fullshard.launch.signals import StopSignals
from fullshard.log.console import Bar, Console
from fullshard.log.meters import Meters
from fullshard.step import StepResult, seed_everything, train_step


@dataclass
class Parts:
    """Everything the loop puts together; made by build.py."""

    model: nn.Module
    objective: Objective
    aux: dict[str, nn.Module]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    schedule: Schedule
    base_lr: float
    clip: float | None
    windows: Callable[[int], Iterator[Any]]
    steps_per_epoch: int
    total_steps: int
    epochs: float
    evaluations: Sequence[Evaluation]
    evaluation_inputs: EvaluationInputs
    evaluate_due: Due
    save_due: Due
    save_at_end: bool
    approach: Approach
    log_every: int
    log_sample_ids: bool
    best: BestRule | None
    patience: int | None
    saver: Saver
    write: Callable[[dict[str, Any]], None]
    console: Console
    meters: Meters
    progress: Progress
    device: torch.device
    rank: int
    seed: int
    workers: int
    folder: Path
    pending: dict[str, torch.Tensor] = field(default_factory=dict)
    """(sum, count) of the loss and each metric that are still on the device."""
    saved_step: int = -1
    saved_at: float = field(default_factory=time.monotonic)
    validation: dict[str, float] = field(default_factory=dict)
    stop_signals: StopSignals = field(default_factory=StopSignals)
    last: StepResult | None = None
    stop: bool = False
    overdue: bool = False
    """The minutes between two saves have passed, by the clock of rank 0."""


def fit(parts: Parts) -> Result:
    """Trains until the last step, the end of patience, or a signal."""
    progress = parts.progress
    parts.console.run_begin(parts.total_steps, done=progress.step)
    with parts.stop_signals:
        windows = parts.windows(progress.step)
        if parts.approach.soon(progress.step):
            parts.saver.approach()
        if parts.evaluate_due.at_start and progress.step == 0:
            _judge(parts, _evaluate(parts, at_end=False))
        stopped = "done" if progress.settled else _settle(parts)
        while progress.step < parts.total_steps and stopped == "done":
            stopped = _epoch(parts, windows)
            progress.seconds = parts.meters.seconds
        if parts.saved_step != progress.step and (parts.save_at_end or stopped == "signal"):
            _save(parts, best=False)
        with parts.meters.phase("save"):
            parts.saver.settle()
        if progress.finished:
            _at_end(parts, progress.seconds)
    return Result(
        str(parts.folder), progress.step, progress.best, progress.best_step, parts.validation, stopped, progress.seconds
    )


def _epoch(parts: Parts, windows: Iterator[Any]) -> str:
    """One epoch, or what is left of it; returns why it ended."""
    progress, begun = parts.progress, time.monotonic()
    epoch, done = divmod(progress.step, parts.steps_per_epoch)
    steps = min(parts.steps_per_epoch - done, parts.total_steps - progress.step)
    part = Steps(done, done + steps, parts.steps_per_epoch)
    parts.console.epoch_begin(epoch + 1, math.ceil(parts.epochs), _lr(parts), steps=part)
    with parts.console.training_bar(done + steps, done=done) as bar:
        for number in range(steps):
            result = _step(parts, windows)
            if progress.step % parts.log_every == 0 or progress.step == 1 or number == steps - 1:
                _log(parts, result, bar)
            else:
                bar.advance()
            if parts.stop:
                progress.settled = False
                return "signal"
            if number < steps - 1 and (stopped := _after_step(parts)) != "done":
                return stopped
    return _after_epoch(parts, epoch + 1, part, seconds=time.monotonic() - begun)


def _step(parts: Parts, windows: Iterator[Any]) -> StepResult:
    progress = parts.progress
    with parts.meters.phase("data"):
        window = next(windows)
    with parts.meters.phase("compute"):
        seed_everything(parts.seed, progress.step, parts.rank)
        result = train_step(
            parts.model,
            window.batches,
            objective=parts.objective,
            aux=parts.aux,
            optimizer=parts.optimizer,
            scaler=parts.scaler,
            clip=parts.clip,
            lr=_lr(parts),
            flags=_flags(parts),
            device=parts.device,
        )
    for name, pair in result.sums.items():
        parts.pending[name] = parts.pending[name] + pair if name in parts.pending else pair
    progress.step += 1
    progress.schedule_step += not result.skipped
    progress.samples += window.num_samples
    progress.tokens += window.num_tokens
    parts.meters.step(samples=window.num_samples, tokens=window.num_tokens)
    if parts.log_sample_ids:
        ids = [i for part in reduce.gather_objects(window.sample_ids()) for i in part]
        parts.write({"kind": "event", "event": "samples", "step": progress.step, "sample_ids": ids})
    _read_flags(parts)
    parts.last = result
    return result


def _flags(parts: Parts) -> tuple[bool, bool, bool, bool]:
    """What this rank would have all ranks do: stop, fail with a save that went wrong, save for it is time, make ready
    for a save that comes near."""
    parts.saver.report()
    main, since_save = parts.rank == 0, time.monotonic() - parts.saved_at
    overdue = main and parts.save_due.after_seconds(since_save)
    near = main and parts.approach.near(parts.progress.step, since_save_s=since_save)
    return parts.stop_signals.heard is not None, parts.saver.failed, overdue, near


def _read_flags(parts: Parts) -> None:
    """The flags of the step before: reading this step's would make the host wait for the device."""
    if parts.last is not None:
        parts.stop, failed, overdue, near = (number > 0 for number in parts.last.flags.read())
        # The last save answered a flag raised before it.
        parts.overdue = overdue and parts.saved_step < parts.progress.step - 1
        if failed:
            parts.saver.settle()
        if near:
            parts.saver.approach()


def _lr(parts: Parts) -> float:
    return parts.base_lr * parts.schedule.factor(parts.progress.schedule_step, parts.total_steps)


def _flush(parts: Parts) -> float:
    """Reads the sums off the device, over all ranks; this is where the host waits. Gives the loss not logged yet."""
    with parts.meters.phase("compute"):
        flush(parts.pending, parts.progress)
    return average(parts.progress.unlogged.get("loss", [0.0, 0.0]))


def _log(parts: Parts, result: StepResult, bar: Bar) -> None:
    loss, grad_norm, progress = _flush(parts), float(result.grad_norm), parts.progress
    averages = {name: average(pair) for name, pair in progress.unlogged.items() if name != "loss"}
    progress.unlogged = {}
    with parts.meters.phase("log"):
        record = parts.meters.record(
            step=progress.step,
            epoch=round(progress.step / parts.steps_per_epoch, 4),
            loss=loss,
            lr=float(parts.optimizer.param_groups[0]["lr"]),
            grad_norm=grad_norm,
            memory_bytes=peaks(parts.device),
            **averages,
            **_scaling(parts),
        )
        parts.write(record)
        bar.advance(loss)
        bar.log(record)
        if parts.rank == 0 and (advice := parts.meters.advice(workers=parts.workers)):
            parts.console.warn(advice)
    _require_finite(parts, loss)


def _scaling(parts: Parts) -> dict[str, float]:
    """Under fp16 the loss scale, and how many steps an overflow has cost so far."""
    skipped = parts.progress.step - parts.progress.schedule_step
    return {"loss_scale": parts.scaler.get_scale(), "skipped_steps": skipped} if parts.scaler else {}


def _require_finite(parts: Parts, loss: float) -> None:
    """Stops a run whose numbers are no longer any; asked before every save, so that no checkpoint holds them."""
    norm = 0.0 if parts.last is None or parts.last.skipped else float(parts.last.grad_norm)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise NumericalError(
            f"At step {parts.progress.step} the loss is {loss} and the gradient norm {norm}; both must be finite. "
            f"Lower optimizer.lr, lengthen schedule.warmup, or look at the last {parts.log_every} steps' samples."
        )


def _settle(parts: Parts) -> str:
    """Does what was due after the last step of a run that a signal stopped there."""
    progress = parts.progress
    progress.settled = True
    if progress.step % parts.steps_per_epoch and progress.step < parts.total_steps:
        return _after_step(parts)
    epoch = math.ceil(progress.step / parts.steps_per_epoch)
    done = progress.step - (epoch - 1) * parts.steps_per_epoch
    return _after_epoch(parts, epoch, Steps(0, done, parts.steps_per_epoch), seconds=0.0)


def _after_step(parts: Parts) -> str:
    """What is due within an epoch; after its last step `_after_epoch` takes over."""
    stopped, keep = "done", False
    if parts.evaluate_due.after_step(parts.progress.step):
        stopped, keep = _judge(parts, _evaluate(parts, at_end=False))
    if keep or parts.overdue or parts.save_due.after_step(parts.progress.step) or stopped != "done":
        _save(parts, best=keep)
    return stopped


def _after_epoch(parts: Parts, epoch: int, part: Steps, *, seconds: float) -> str:
    """What is due at the end of an epoch, or of a run that ends within one."""
    progress = parts.progress
    _require_finite(parts, _flush(parts))
    train_loss = average(progress.epoch_sums.get("loss", [0.0, 0.0]))
    ended = progress.step >= parts.total_steps
    numbers: dict[str, float] = {}
    if parts.evaluate_due.after_epoch(epoch) or parts.evaluate_due.after_step(progress.step) or ended:
        numbers = _evaluate(parts, at_end=False)
    val_loss = numbers.get("loss")
    parts.console.epoch_end(epoch, seconds=seconds, train_loss=train_loss, val_loss=val_loss, steps=part)
    stopped, keep = _judge(parts, numbers)
    if progress.step % parts.steps_per_epoch == 0:
        progress.epoch, progress.epoch_sums = epoch, {}
    progress.finished = ended or stopped == "patience"
    due = parts.save_due.after_epoch(epoch) or parts.save_due.after_step(progress.step) or parts.overdue
    if keep or due or (progress.finished and parts.save_at_end):
        _save(parts, best=keep)
    return stopped


def _judge(parts: Parts, numbers: dict[str, float]) -> tuple[str, bool]:
    """Whether to stop, and whether to keep this model as the best; the numbers are the same on every rank."""
    rule, progress = parts.best, parts.progress
    if rule is None or not numbers:
        return "done", False
    if rule.metric not in numbers:
        saved = None
        if progress.step:
            progress.settled = False  # the run that goes on judges again
            _save(parts, best=False)
            parts.saver.settle()
            saved = f"The model of step {progress.step} is saved"
        raise best.not_found(rule, numbers, saved=saved)
    return best.judge(rule, progress, numbers[rule.metric], patience=parts.patience, console=parts.console)


def _evaluate(parts: Parts, *, at_end: bool) -> dict[str, float]:
    """Runs the evaluations that belong here and writes down what they find."""
    numbers: dict[str, float] = {}
    texts: list[str] = []
    parts.model.eval()
    with parts.meters.phase("evaluate"):
        for evaluation in parts.evaluations:
            if evaluation.only_at_end == at_end:
                found = evaluation.run(parts.evaluation_inputs)
                numbers |= found.numbers
                texts += found.texts
    parts.validation = numbers or parts.validation
    if numbers:
        epoch = round(parts.progress.step / parts.steps_per_epoch, 4)
        parts.write({"kind": "validation", "step": parts.progress.step, "epoch": epoch, **numbers})
        parts.console.validated(numbers)
    for text in texts:
        parts.console.say(text)
    return numbers


def _save(parts: Parts, *, best: bool) -> None:
    _require_finite(parts, _flush(parts))
    begun, parts.progress.seconds = time.monotonic(), parts.meters.seconds
    with parts.meters.phase("save"):
        parts.saver.save(parts.progress, best)
    parts.saved_step, parts.saved_at, parts.overdue = parts.progress.step, time.monotonic(), False
    stall = round(parts.saved_at - begun, 4)
    parts.write({"kind": "event", "event": "saved", "step": parts.progress.step, "stall_seconds": stall})


def _at_end(parts: Parts, seconds: float) -> None:
    exported = "not exported (checkpoint.at_end = false)"
    if parts.save_at_end:
        with parts.meters.phase("save"):
            exported = parts.saver.export(parts.progress)
    _evaluate(parts, at_end=True)
    rows = [("best", best.outcome(parts.best, parts.progress)), ("model", exported), ("run folder", str(parts.folder))]
    if parts.best and (line := best.only_worse(parts.best, parts.progress)):
        rows.insert(0, ("warning", line))
    if skipped := _scaling(parts).get("skipped_steps"):
        rows.insert(
            1, ("skipped", f"{skipped:,} of {parts.progress.step:,} steps overflowed in fp16, and moved no weight")
        )
    parts.console.finished(seconds, rows)
