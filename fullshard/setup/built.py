"""What build.py hands over: the parts of a run, and the facts that the run summary states. Must not do anything."""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.loop import Parts
from fullshard.recipe import Recipe
from fullshard.setup.sharded_model import ShardedModel


@dataclass(frozen=True)
class Built:
    """A run that is ready for its first step."""

    parts: Parts
    model: ShardedModel
    proofs: list[str]
    """What was proven before the first step."""
    workers: int
    """Loader processes of each rank."""
    resolved: Recipe
    """The recipe with every "auto" replaced by what it became."""
