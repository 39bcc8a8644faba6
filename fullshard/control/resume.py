"""Which checkpoint a run resumes from, and whether the recipe still describes the same run.

A change that alters what the steps mean is refused with the difference; any other is noted, and so is a learning rate
that differs from before: a schedule depends on the run's length. Must not know how tensors are read, models or
sharding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity
from fullshard.config.part import decode, flat
from fullshard.contracts.progress import Progress
from fullshard.contracts.schedule import Schedule
from fullshard.errors import CheckpointError, RecipeError
from fullshard.proofs.same_data import Inventory, changes
from fullshard.recipe import IN_FORCE, unset

_MATTERS = ("seed", "model.", "objective.", "data.", "optimizer.kind")
_HARMLESS = (
    "data.train",  # its content decides, which has a fingerprint
    "data.validation",
    "data.workers",
    "data.cache",
    "model.attention",
    "model.trust_remote_code",
)
_SILENT = ("output", "name", "log.", "guard.", "topology.launcher", "checkpoint.store", "batch.", "duration.")
"""Not noted. The identity has the rows per step, which `batch` decides; a run may always be made longer."""
_AUTO = ("data.workers", "sharding.strategy", "sharding.compile", "precision", "topology.", "checkpoint.asynchronous")
"""Chosen by fullshard where a recipe leaves them open: a resolved recipe, which has the choice, changes nothing."""
_CONTENT = "content of data.train"
_WORDS = {"samples": "rows", "samples per step": "rows per step"}
"""What is counted, for names that checkpoints have; without packing a row is a sample."""
_ANOTHER = "Resume from another one: --resume RUN/checkpoint-STEP, or start over with --resume never."


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts."""

    progress: Progress
    notes: list[str]
    """What has changed since the checkpoint."""


class _Facts(BaseModel):
    """What state.json must say, checked once so that all later code can rely on the types."""

    progress: Progress
    identity: dict[str, Any] = {}
    recipe: dict[str, Any] = {}
    data: dict[str, dict[str, Any]] = {}
    optimizer: dict[str, Any] = {}
    scaler: dict[str, float] | None = None
    frozen: dict[str, int] | None = None


def resume_point(
    checkpoint: Path | None,
    *,
    identity: dict[str, Any],
    recipe: dict[str, Any],
    content: Inventory | None = None,
    steps_per_epoch: int = 1,
    anyway: bool = False,
) -> ResumePoint:
    """Where the run starts; raises with the differences if the checkpoint belongs to another run."""
    if checkpoint is None:
        return ResumePoint(Progress(), [])
    facts = _read_facts(checkpoint)
    known = any(key.startswith(IN_FORCE) for key in facts.identity)  # older checkpoints do not say
    identity = {key: value for key, value in identity.items() if known or not key.startswith(IN_FORCE)}
    left_out = IN_FORCE if known else unset(flat(facts.recipe), flat(recipe))
    changed = [line for line in _changes(flat(facts.recipe), flat(recipe)) if not line.startswith(left_out)]
    refused = [
        _other_data(facts.data, content or {}, changed) if change.startswith(f"{_CONTENT}:") else change
        for change in _changes(facts.identity, identity)
    ]
    refused += [change for change in changed if change.startswith(_MATTERS) and not change.startswith(_HARMLESS)]
    if refused and not anyway:
        raise CheckpointError(
            f"{checkpoint} cannot be resumed with this recipe, which describes another run: {'; '.join(refused)}. "
            "Go back to those settings (batch.global keeps the step the same for any number of ranks), start over with "
            "--resume never, or continue from its weights regardless with --resume-anyway."
        )
    noted = [change for change in changed if change not in refused and not change.startswith(_SILENT)]
    notes = [f"Changed since the checkpoint: {change}." for change in noted]
    if line := rate_change(facts.recipe, recipe, facts.progress, steps_per_epoch=steps_per_epoch):
        notes.append(line)
    notes += [f"Resumed anyway, although it changes what the steps mean: {change}." for change in refused]
    return ResumePoint(facts.progress, notes)


def _read_facts(checkpoint: Path) -> _Facts:
    state = files.read_state(checkpoint)
    try:
        facts = _Facts.model_validate(state)
    except ValidationError as error:
        wrong = [f"{'.'.join(str(key) for key in line['loc'])}: {line['msg']}" for line in error.errors()]
        raise CheckpointError(
            f"{checkpoint / files.STATE} does not say how far the run is ({'; '.join(wrong[:3])}). {_ANOTHER}"
        ) from error
    step, written = facts.progress.step, files.read_manifest(checkpoint).get("step")
    if step != written or step < 0:
        raise CheckpointError(
            f"{checkpoint / files.STATE} says step {step}, but the manifest says step {written}. {_ANOTHER}"
        )
    return facts


def _other_data(before: Inventory, now: Inventory, settings: list[str]) -> str:
    """What has changed in the training data, instead of two hashes: its files, else its settings."""
    found = changes(before, now) if before and now else []
    found += [change for change in settings if change.startswith("data.train")]
    unknown = "the order of its files" if before and now else "the checkpoint does not say what"
    return f"{_CONTENT} has changed: {'; '.join(found) or unknown}"


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    def show(value: Any) -> str:
        return "not set" if value is None else str(value)

    return [
        f"{_WORDS.get(key, key)}: {show(before.get(key))} then, {show(now.get(key))} now"
        for key in dict.fromkeys((*now, *before))
        if before.get(key) != now.get(key)
        and not (key.startswith(_AUTO) and any(each in (None, "auto") for each in (before.get(key), now.get(key))))
    ]


def rate_change(before: dict[str, Any], now: dict[str, Any], progress: Progress, *, steps_per_epoch: int) -> str | None:
    """A note if the last step has another learning rate by the recipe `now` than by `before`, which trained it."""

    def rate(recipe: dict[str, Any], step: int) -> float:
        duration, schedule = recipe["duration"], decode(Schedule, recipe["schedule"], where="schedule")
        total = duration.get("steps") or math.ceil(Fraction(str(duration["epochs"])) * steps_per_epoch)
        return float(recipe["optimizer"]["lr"] * schedule.factor(step, total))

    done = progress.schedule_step - 1
    if done < 0:
        return None
    with contextlib.suppress(RecipeError, KeyError, TypeError, ValueError):  # a part that is not installed
        had, has = rate(before, done), rate(now, done)
        if not math.isclose(had, has, abs_tol=1e-15):
            causes = ("duration.", "schedule.", "optimizer.lr:")
            changed = [change for change in _changes(flat(before), flat(now)) if change.startswith(causes)]
            return (
                f"The learning rate at step {progress.step:,} was {had:.3g} and is {has:.3g} by this recipe; the next "
                f"step has {rate(now, done + 1):.3g}. Changed: {'; '.join(changed)}."
            )
    return None


def candidates(run: Path, resume: str) -> list[Path]:
    """The checkpoints to try, the preferred one first: none for `never`, all for `auto`, or the one at a path."""
    if resume == "never":
        return []
    if resume == "auto":
        return files.candidates(run)
    try:
        return [files.named(resume)]
    except CheckpointError as error:
        raise CheckpointError(f"--resume {error}") from None


def choose(
    among: list[Path], resume: str, *, problems: Callable[[Path], list[str]], warn: Callable[[str], None]
) -> Path | None:
    """The first candidate that is complete; raises if the one that `resume` names is not.

    `problems` reads every byte; with several ranks each reads a share, and all get the same answer."""
    damaged = []
    for checkpoint in among:
        found = problems(checkpoint)
        if not found:
            return checkpoint
        if newer := [line for line in found if files.NEWER in line]:
            # Resuming from an older one would give up what a newer fullshard has trained.
            raise CheckpointError(f"{newer[0]} {_ANOTHER}")
        if files.is_remote(checkpoint) and (unread := [line for line in found if integrity.UNREAD in line]):
            # The network may be down for a minute: do not fall back to an older checkpoint for that.
            raise CheckpointError(f"{unread[0]}. Try again when the store can be reached. {_ANOTHER}")
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        damaged.append(f"{checkpoint} is damaged: {'; '.join(found[:3])}{more}.")
        if resume == "auto":
            warn(damaged[-1])
    if damaged:
        none = f"No checkpoint in {among[0].parent} is whole. " if resume == "auto" else f"--resume {resume}: "
        raise CheckpointError(f"{none}{' '.join(damaged)} {_ANOTHER} Nothing is deleted.")
    return None
