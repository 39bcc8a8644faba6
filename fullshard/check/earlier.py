"""Whether training would resume from an earlier run in the run folder, and what has changed since.

Only reads. Must not know ranks, nor what a checkpoint holds beyond its facts.
"""

from __future__ import annotations

from collections.abc import Iterator

from fullshard.check.findings import Finding, ok, warning
from fullshard.checkpoint import folder as files
from fullshard.checkpoint import integrity
from fullshard.control import resume
from fullshard.recipe import Recipe
from fullshard.setup.inputs import RunInputs
from fullshard.setup.run_inputs import resume_run

_NAME = "earlier run"


def look(recipe: Recipe, inputs: RunInputs, *, asked: str | None = None, anyway: bool = False) -> Iterator[Finding]:
    """The checkpoint that `train` resumes from, by default or with `--resume ASKED`. Raises CheckpointError if all are
    damaged, or if it belongs to other data or another model. Without one, silent unless `--resume` is given."""
    if asked == "never":
        there = files.published(recipe.checkpoints) or recipe.folder.exists()
        yield ok(_NAME, f"train starts over at step 0{f'; {recipe.folder} is moved aside' if there else ''}")
        return
    warnings: list[str] = []
    among = resume.candidates(recipe.checkpoints, asked or "auto")
    checkpoint = resume.choose(
        among, asked or "auto", problems=lambda path: integrity.problems(path, checksums=False), warn=warnings.append
    )
    for line in warnings:
        yield warning(_NAME, line, "train resumes from the newest complete one before it.")
    if checkpoint is None:
        if asked is not None:
            yield ok(_NAME, f"no checkpoint in {recipe.checkpoints}: train starts at step 0")
        return
    point = resume_run(recipe, inputs, checkpoint, anyway=anyway)
    progress, total = point.progress, inputs.plan.total_steps
    if progress.finished and progress.step >= total:
        text = f"{recipe.folder} is finished, all {total:,} steps are done: train has nothing to do"
    else:
        text = f"train resumes from {checkpoint}, step {progress.step:,} of {total:,}"
    yield ok(_NAME, f"{text}; --resume never starts over")
    for note in point.notes:
        harmless = note.startswith("Changed since")
        yield ok(_NAME, note) if harmless else warning(_NAME, note, "To avoid it, go back to the earlier settings.")
