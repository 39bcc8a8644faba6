"""The step arithmetic: how many rows make a step, how many steps make an epoch and a run.

Pure numbers, so that a laptop can say what a cluster will do. Must not know torch, data or ranks beyond their number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from fullshard.errors import RecipeError
from fullshard.faults.micro_batch import usual
from fullshard.formatting.plural import counted
from fullshard.recipe import Batch, Duration


@dataclass(frozen=True)
class StepPlan:
    """How a run divides into steps."""

    num_rows: int
    per_device: int
    accumulate: int
    """Micro-batches of one rank in one step."""
    world: int
    """Ranks that read different data."""
    steps_per_epoch: int
    """The partial last window of an epoch is a step."""
    total_steps: int
    packed: bool = False
    """Whether a row may hold several samples; otherwise it is one, and is called so."""

    @property
    def global_size(self) -> int:
        """Rows in one step over all ranks."""
        return self.per_device * self.accumulate * self.world

    def of(self, per_device: int) -> StepPlan:
        """The same steps in other micro-batches."""
        return replace(self, per_device=per_device, accumulate=self.per_device * self.accumulate // per_device)

    @property
    def epochs(self) -> float:
        return self.total_steps / self.steps_per_epoch

    @property
    def noun(self) -> str:
        """What is counted: rows, or the samples that they are without packing."""
        return "row" if self.packed else "sample"

    def describe(self) -> list[str]:
        """The arithmetic in two lines, every number named."""
        left = self.num_rows % self.global_size
        last = f"; the last step of an epoch has {left:,}" if left else ""
        return [
            f"batch: {counted(self.global_size, self.noun)} per step = {self.per_device:,} per device x "
            f"{self.accumulate:,} accumulated x {counted(self.world, 'rank')}",
            f"steps: {self.total_steps:,} = {counted(self.epochs, 'epoch')} x {self.steps_per_epoch:,} per epoch "
            f"({counted(self.num_rows, self.noun)}{last})",
        ]


def plan_steps(batch: Batch, duration: Duration, *, num_rows: int, world: int, packed: bool = False) -> StepPlan:
    """Works out the steps of a run from these sections of its recipe."""
    if num_rows < 1:
        raise RecipeError("data.train gives no sample to train on. Check the path, and that its records hold text.")
    per_device, accumulate = usual(batch.per_device, (batch.global_size or 0) // world), batch.accumulate or 1
    if batch.global_size is not None:
        accumulate = _accumulation(batch.global_size, per_device=per_device, world=world)
    steps_per_epoch = math.ceil(num_rows / (per_device * accumulate * world))
    # Through the decimal text: 0.1 epochs of 30 steps are 3 steps, and as binary floats they would be 4.
    steps = duration.steps or math.ceil(Fraction(str(duration.epochs)) * steps_per_epoch)
    return StepPlan(num_rows, per_device, accumulate, world, steps_per_epoch, steps, packed)


def _accumulation(global_size: int, *, per_device: int, world: int) -> int:
    per_pass = per_device * world
    if global_size % per_pass == 0:
        return global_size // per_pass
    below = global_size // per_pass * per_pass
    use = f"{below} or {below + per_pass}" if below else f"{per_pass}, or a smaller batch.per_device"
    raise RecipeError(
        f"batch.global = {global_size} cannot be split evenly: {counted(world, 'rank')} x batch.per_device = "
        f"{per_device} makes {per_pass} per pass, and {global_size} is not a multiple of "
        f"{per_pass}. Use batch.global = {use}."
    )
