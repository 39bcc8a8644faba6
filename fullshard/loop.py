"""The loop: step until done; when to log, validate, save and stop.

One loop for every objective. Every decision follows from numbers that are the same on all ranks.
Must not know FSDP, losses, file formats or recipes.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.dist import reduce
from fullshard.errors import NumericalError
from fullshard.evaluate.base import Evaluation, EvaluationInputs, Findings
from fullshard.log.console import Bar, Console
from fullshard.log.meters import Meters
from fullshard.objectives.base import Objective
from fullshard.schedules.base import Schedule
from fullshard.state import Progress, Result
from fullshard.step import StepResult, seed_everything, train_step

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True)
class Due:
    """When something happens: every so many steps, every so many epochs, or never."""

    every_steps: int | None
    every_epochs: int | None

    def after_step(self, step: int) -> bool:
        return self.every_steps is not None and step % self.every_steps == 0

    def after_epoch(self, epoch: int) -> bool:
        return self.every_epochs is not None and epoch % self.every_epochs == 0


@dataclass(frozen=True)
class BestRule:
    """Which validation number decides, and which way."""

    metric: str
    mode: str

    def better(self, value: float, best: float | None) -> bool:
        return best is None or (value < best if self.mode == "min" else value > best)


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
    evaluation_inputs: EvaluationInputs | None
    evaluate_due: Due
    save_due: Due
    log_every: int
    log_sample_ids: bool
    best: BestRule | None
    patience: int | None
    save: Callable[[Progress, bool], None]
    """Writes a checkpoint; the flag says that it is the best so far."""
    export: Callable[[], Path]
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
    """(sum, count) of the loss and each metric since they were last read."""
    saved_step: int = -1
    validation: dict[str, float] = field(default_factory=dict)
    stop_signal: str | None = None
    stop_wishes: reduce.OnItsWay | None = None


def fit(parts: Parts) -> Result:
    """Trains until the last step, the end of patience, or a signal."""
    progress, begun, before = parts.progress, time.monotonic(), parts.progress.seconds
    restore = _listen(parts)
    parts.console.run_begin(parts.total_steps, done=progress.step)
    stopped = "done"
    try:
        windows = parts.windows(progress.step)
        while progress.step < parts.total_steps and stopped == "done":
            stopped = _epoch(parts, windows)
            progress.seconds = before + time.monotonic() - begun
        progress.finished = stopped != "signal"
        if parts.saved_step != progress.step or progress.finished:
            _save(parts, best=False)
        if progress.finished:
            _at_end(parts, progress.seconds)
    finally:
        restore()
    return Result(
        str(parts.folder), progress.step, progress.best, progress.best_step, parts.validation, stopped, progress.seconds
    )


def _epoch(parts: Parts, windows: Iterator[Any]) -> str:
    """One epoch, or what is left of it; returns why it ended."""
    progress, begun = parts.progress, time.monotonic()
    epoch, done = divmod(progress.step, parts.steps_per_epoch)
    steps = min(parts.steps_per_epoch - done, parts.total_steps - progress.step)
    parts.console.epoch_begin(epoch + 1, parts.epochs, _lr(parts))
    stopped = "done"
    with parts.console.training_bar(done + steps, done=done) as bar:
        for _ in range(steps):
            result = _step(parts, windows)
            if progress.step % parts.log_every == 0 or progress.step in (1, parts.total_steps):
                _log(parts, result, bar)
            else:
                bar.advance()
            stopped = _after_step(parts, result)
            if stopped != "done":
                break
    _flush(parts)
    loss_sum, count = progress.epoch_sums.get("loss", [0.0, 0.0])
    whole = progress.step % parts.steps_per_epoch == 0
    if stopped == "done" and whole:
        progress.epoch, progress.epoch_sums = epoch + 1, {}
        stopped = _after_epoch(parts)
    if stopped != "signal":
        validation = parts.validation.get("loss") if whole else None
        seconds = time.monotonic() - begun
        parts.console.epoch_end(epoch + 1, seconds=seconds, train_loss=loss_sum / max(count, 1), val_loss=validation)
    return stopped


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
            stop=parts.stop_signal is not None,
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
    return result


def _lr(parts: Parts) -> float:
    return parts.base_lr * parts.schedule.factor(parts.progress.schedule_step, parts.total_steps)


def _flush(parts: Parts) -> dict[str, float]:
    """Averages over all ranks since the last call; this is where the host waits for the device."""
    if not parts.pending:
        return {}
    names = sorted(parts.pending)
    with parts.meters.phase("compute"):
        pairs = reduce.sum_over_ranks(torch.stack([parts.pending[name] for name in names])).tolist()
    parts.pending = {}
    for name, (total, count) in zip(names, pairs, strict=True):
        sums = parts.progress.epoch_sums.setdefault(name, [0.0, 0.0])
        sums[0], sums[1] = sums[0] + total, sums[1] + count
    return {name: total / max(count, 1) for name, (total, count) in zip(names, pairs, strict=True)}


def _log(parts: Parts, result: StepResult, bar: Bar) -> None:
    averages = _flush(parts)
    loss, grad_norm, progress = averages.pop("loss"), float(result.grad_norm), parts.progress
    with parts.meters.phase("log"):
        memory = torch.cuda.max_memory_allocated(parts.device) if parts.device.type == "cuda" else None
        record = parts.meters.record(
            step=progress.step,
            epoch=round(progress.step / parts.steps_per_epoch, 4),
            loss=loss,
            lr=parts.optimizer.param_groups[0]["lr"],
            grad_norm=grad_norm,
            memory_bytes=memory,
            **averages,
            **({"loss_scale": parts.scaler.get_scale()} if parts.scaler else {}),
        )
        parts.write(record)
        bar.advance(loss)
        bar.log(record)
        if advice := parts.meters.advice(workers=parts.workers):
            parts.console.warn(advice)
    overflow_is_expected = parts.scaler is not None and result.skipped
    if not (math.isfinite(loss) and (math.isfinite(grad_norm) or overflow_is_expected)):
        raise NumericalError(
            f"At step {progress.step} the loss is {loss} and the gradient norm {grad_norm}; both must be finite. "
            f"Lower optimizer.lr, lengthen schedule.warmup, or look at the samples of the last {parts.log_every} steps. "
            "The last checkpoint is from before."
        )


def _after_step(parts: Parts, result: StepResult) -> str:
    step = parts.progress.step
    whole = step % parts.steps_per_epoch == 0
    # The wish of the step before: reading this step's would make the host wait for the device.
    stopped = "signal" if parts.stop_wishes is not None and parts.stop_wishes.read() > 0 else "done"
    parts.stop_wishes = result.stop
    best = False
    if stopped == "done" and parts.evaluate_due.after_step(step) and not whole:
        stopped, best = _validate(parts)
    if best or parts.save_due.after_step(step):
        _save(parts, best=best)
    return stopped


def _after_epoch(parts: Parts) -> str:
    step, epoch = parts.progress.step, parts.progress.epoch
    stopped, best = "done", False
    if parts.evaluate_due.after_epoch(epoch) or parts.evaluate_due.after_step(step) or step == parts.total_steps:
        stopped, best = _validate(parts)
    if best or parts.save_due.after_epoch(epoch):
        _save(parts, best=best)
    return stopped


def _validate(parts: Parts) -> tuple[str, bool]:
    """Runs the evaluations; returns why to stop, if so, and whether this is the best model yet."""
    numbers = _evaluate(parts, [e for e in parts.evaluations if not e.only_at_end]).numbers
    progress = parts.progress
    if parts.best is None or not numbers:
        return "done", False
    if parts.best.metric not in numbers:
        raise NumericalError(
            f"checkpoint.best.metric = {parts.best.metric!r} is not among the validation numbers: {', '.join(numbers)}."
        )
    value = numbers[parts.best.metric]
    if math.isfinite(value) and parts.best.better(value, progress.best):
        progress.best, progress.best_step, progress.validations_without_gain = value, progress.step, 0
        parts.console.new_best(value, parts.best.metric)
        return "done", True
    progress.validations_without_gain += 1
    if parts.patience and progress.validations_without_gain >= parts.patience:
        parts.console.say(f"Stopping early: {parts.patience} validations without a better {parts.best.metric}.")
        return "patience", False
    return "done", False


def _evaluate(parts: Parts, evaluations: Sequence[Evaluation]) -> Findings:
    inputs = parts.evaluation_inputs
    if inputs is None or not evaluations:
        return Findings()
    numbers: dict[str, float] = {}
    texts: list[str] = []
    parts.model.eval()
    with parts.meters.phase("evaluate"):
        for evaluation in evaluations:
            found = evaluation.run(inputs)
            numbers |= found.numbers
            texts += found.texts
    parts.validation = numbers or parts.validation
    if numbers:
        parts.write({"kind": "validation", "step": parts.progress.step, "epoch": parts.progress.epoch, **numbers})
    for text in texts:
        parts.console.say(text)
    return Findings(numbers, texts)


def _save(parts: Parts, *, best: bool) -> None:
    _flush(parts)
    with parts.meters.phase("save"):
        parts.save(parts.progress, best)
    parts.saved_step = parts.progress.step


def _at_end(parts: Parts, seconds: float) -> None:
    with parts.meters.phase("save"):
        exported = parts.export()
    _evaluate(parts, [e for e in parts.evaluations if e.only_at_end])
    best = f"{parts.progress.best:.6f} at step {parts.progress.best_step}" if parts.progress.best is not None else "none"
    rows = [("best", best), ("model", str(exported)), ("run folder", str(parts.folder))]
    parts.console.finished(seconds, rows)


def _listen(parts: Parts) -> Callable[[], None]:
    """Turns a stop signal into a wish that all ranks agree on after the step; a second one ends the process at once."""

    def on_signal(number: int, _: Any) -> None:
        if parts.stop_signal is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        parts.stop_signal = signal.Signals(number).name

    try:
        earlier = {number: signal.signal(number, on_signal) for number in STOP_SIGNALS}
    except ValueError:  # not in the main thread of the process: whoever runs us there handles signals
        return lambda: None

    def restore() -> None:
        for number, handler in earlier.items():
            signal.signal(number, handler)

    return restore
