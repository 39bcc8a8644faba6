"""What an earlier run left in the run folder, and whether training would go on from it.

Only reads. Must not know ranks, nor what a checkpoint holds beyond its facts.
"""

from __future__ import annotations

from collections.abc import Iterator

from fullshard import resume
from fullshard.check.findings import Finding, ok
from fullshard.checkpoint import folder as files
from fullshard.errors import CheckpointError
from fullshard.ground import Ground
from fullshard.part import plain
from fullshard.recipe import Recipe


def look(recipe: Recipe, ground: Ground) -> Iterator[Finding]:
    """The checkpoint that `train` goes on from by itself; CheckpointError when it is damaged, or when its steps mean
    other samples than those of this recipe. Nothing where there is none."""
    if (checkpoint := next(iter(files.candidates(recipe.checkpoints)), None)) is None:
        return
    if found := resume.look(checkpoint, checksums=False):
        raise CheckpointError(
            f"{resume.damage(checkpoint, found)} `fullshard train` would go on from the newest one that is whole; "
            "--resume never starts over."
        )
    standing = resume.stand(checkpoint, identity=ground.identity, recipe=plain(recipe))
    progress, total = standing.progress, ground.plan.total_steps
    if progress.finished and progress.step >= total:
        text = f"{recipe.folder} is finished, all {total:,} steps are done: train has nothing left to do"
    else:
        text = f"train goes on from {checkpoint}, step {progress.step:,} of {total:,}"
    yield ok("earlier run", f"{text}; --resume never starts over")


__all__ = ["look"]
