"""Which checkpoint a run goes on from, and whether the recipe still means the same run.

A change that gives the steps another meaning is refused with the difference; any other is noted.
Must not know how checkpoints are read, models or sharding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity
from fullshard.config.part import flat
from fullshard.contracts.progress import Progress
from fullshard.control.resumed_rate import jump
from fullshard.data.inventory import Inventory, changes
from fullshard.errors import CheckpointError

_MATTERS = ("seed", "model.", "objective.", "data.", "optimizer.kind")
_HARMLESS = (
    "data.train",  # its content decides, which has a fingerprint
    "data.validation",
    "data.workers",
    "data.cache",
    "model.attention",
    "model.trust_remote_code",
)
_SILENT = ("output", "name", "log.", "topology.launcher", "checkpoint.store")


@dataclass(frozen=True)
class ResumePoint:
    """Where a run stands when it starts."""

    progress: Progress
    notes: list[str]
    """What has changed since the checkpoint."""


def resume_point(
    checkpoint: Path | None,
    *,
    identity: dict[str, Any],
    recipe: dict[str, Any],
    content: Inventory | None = None,
    steps_per_epoch: int = 1,
    anyway: bool = False,
) -> ResumePoint:
    """Where the run stands; an error with the differences when the checkpoint is that of another run."""
    if checkpoint is None:
        return ResumePoint(Progress(), [])
    facts = _read_facts(checkpoint)
    noted, changed = [], _changes(flat(facts.recipe), flat(recipe))
    refused = [
        _other_data(facts.data, content or {}, changed) if change.startswith(f"{_CONTENT}:") else change
        for change in _changes(facts.identity, identity)
    ]
    for change in changed:
        key = change.partition(":")[0]
        if key.startswith(_MATTERS) and not key.startswith(_HARMLESS):
            refused.append(change)
        elif not key.startswith((*_SILENT, *_COUNTED)):
            noted.append(change)
    if refused and not anyway:
        raise CheckpointError(
            f"{checkpoint} cannot be resumed with this recipe, which would be another run: {'; '.join(refused)}. "
            "Go back to those settings (batch.global keeps the step the same for any number of ranks), start over with "
            "--resume never, or take the weights and go on all the same with --resume-anyway."
        )
    notes = [f"Changed since the checkpoint: {change}." for change in noted]
    if line := jump(facts.recipe, recipe, facts.progress, steps_per_epoch=steps_per_epoch):
        notes.append(line)
    notes += [f"Resumed anyway, although it changes what the steps mean: {change}." for change in refused]
    return ResumePoint(facts.progress, notes)


_CONTENT = "content of data.train"


def _other_data(before: Inventory, now: Inventory, settings: list[str]) -> str:
    """What has changed of the training data, instead of two hashes: its files, else its settings."""
    found = changes(before, now) if before and now else []
    found += [change for change in settings if change.startswith("data.train")]
    told = "; ".join(found) or (
        "the order of its files" if before and now else "the checkpoint does not say what of it"
    )
    return f"{_CONTENT} has changed: {told}"


class _Facts(BaseModel):
    """What state.json must say, so that nothing after it meets a value of another kind."""

    progress: Progress
    identity: dict[str, Any] = {}
    recipe: dict[str, Any] = {}
    data: dict[str, dict[str, Any]] = {}
    optimizer: dict[str, Any] = {}
    scaler: dict[str, float] | None = None
    frozen: dict[str, int] | None = None


def _read_facts(checkpoint: Path) -> _Facts:
    state = files.read_state(checkpoint)
    try:
        facts = _Facts.model_validate(state)
    except ValidationError as error:
        wrong = [f"{'.'.join(str(key) for key in line['loc'])}: {line['msg']}" for line in error.errors()]
        raise CheckpointError(
            f"{checkpoint / files.STATE} does not say where the run stands ({'; '.join(wrong[:3])}). {_ANOTHER}"
        ) from error
    step, written = facts.progress.step, files.read_manifest(checkpoint).get("step")
    if step != written or step < 0:
        raise CheckpointError(
            f"{checkpoint / files.STATE} is of step {step}, and the manifest beside it of step {written}. {_ANOTHER}"
        )
    return facts


_COUNTED = ("batch.", "duration.")
"""Their meaning, the rows per step, is part of the identity; a run may always be made longer."""
_WORDS = {"samples": "rows", "samples per step": "rows per step"}
"""What is counted, for names that checkpoints have; without packing a row is a sample."""
_ANOTHER = "Resume from another one: --resume RUN/checkpoint-STEP, or start over with --resume never."


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{_WORDS.get(key, key)}: {_show(before.get(key))} then, {_show(now.get(key))} now"
        for key in [*now, *(key for key in before if key not in now)]
        if before.get(key) != now.get(key)
    ]


def _show(value: Any) -> str:
    return "not set" if value is None else str(value)


def candidates(run: Path, resume: str) -> list[Path]:
    """The checkpoints that a run may go on from, the best first: `never` none, a path that one, `auto` all."""
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
    """The first of the candidates that is whole; one that was asked for by name must be.

    `problems` looks at every byte; of several ranks each looks at a share, and all get the same answer."""
    damaged = []
    for checkpoint in among:
        found = problems(checkpoint)
        if not found:
            return checkpoint
        if newer := [line for line in found if files.NEWER in line]:
            # Going on from an older one would give up what a newer fullshard has trained.
            raise CheckpointError(f"{newer[0]} {_ANOTHER}")
        if files.is_remote(checkpoint) and (unread := [line for line in found if integrity.UNREAD in line]):
            # The network may be down for a minute: that is no reason to go on from an older one.
            raise CheckpointError(f"{unread[0]}. Try again when the store can be reached. {_ANOTHER}")
        damaged.append(damage(checkpoint, found))
        if resume == "auto":
            warn(damaged[-1])
    if damaged:
        none = f"No checkpoint in {among[0].parent} is whole. " if resume == "auto" else f"--resume {resume}: "
        raise CheckpointError(f"{none}{' '.join(damaged)} {_ANOTHER} Nothing is deleted.")
    return None


def damage(checkpoint: Path, found: list[str]) -> str:
    """What is wrong with a checkpoint, in a sentence."""
    more = f", and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{checkpoint} is damaged: {'; '.join(found[:3])}{more}."
