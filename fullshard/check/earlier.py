"""What an earlier run left in the run folder, and whether training would go on from it.

Only reads. Must not know ranks, nor what a checkpoint holds beyond its facts.
"""

from __future__ import annotations

from collections.abc import Iterator

from fullshard import resume
from fullshard.check.findings import Finding, ok, warning
from fullshard.checkpoint import folder as files
from fullshard.checkpoint import whole
from fullshard.ground import Ground
from fullshard.part import plain
from fullshard.plural import counted
from fullshard.recipe import Recipe


def look(recipe: Recipe, ground: Ground) -> Iterator[Finding]:
    """The checkpoint that `train` goes on from by itself; CheckpointError when all are damaged, or when its steps mean
    other samples than those of this recipe. Nothing where there is none."""
    warnings: list[str] = []
    among = files.candidates(recipe.checkpoints)
    checkpoint = resume.choose(
        among, "auto", problems=lambda path: whole.problems(path, checksums=False), warn=warnings.append
    )
    for line in warnings:
        yield warning("earlier run", line, "train goes on from the newest one before it that is whole.")
    if checkpoint is None:
        return
    standing = resume.stand(checkpoint, identity=ground.identity, recipe=plain(recipe))
    progress, total = standing.progress, ground.plan.total_steps
    if progress.finished and progress.step >= total:
        text = f"{recipe.folder} is finished, all {counted(total, 'step')} are done: train has nothing left to do"
    else:
        text = f"train goes on from {checkpoint}, step {progress.step:,} of {total:,}"
    yield ok("earlier run", f"{text}; --resume never starts over")


__all__ = ["look"]
