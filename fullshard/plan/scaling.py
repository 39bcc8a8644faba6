"""The same recipe on 1 to 4,096 ranks with each strategy: memory, speed, where it stops scaling and why.

Weak scaling: every rank keeps its micro-batch. Must not know how anything is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fullshard.plan.hardware import Gpu
from fullshard.plan.predict import Place, Planner, Prediction
from fullshard.plan.remedies import with_settings
from fullshard.plan.speed import StepTime, step_time
from fullshard.recipe import Recipe

WORLDS = tuple(2**power for power in range(13))
STRATEGIES = ("full", "hybrid", "grad_op")
STOPS_BELOW = 0.8
"""A strategy stops scaling where a rank is slower than this share of its best."""
GPUS_IN_A_NODE = 8


@dataclass(frozen=True)
class Cell:
    """One strategy on one number of ranks."""

    found: Prediction
    time: StepTime

    @property
    def each(self) -> float:
        """Tokens per second of one rank."""
        return self.time.rate / self.found.place.world

    @property
    def fits(self) -> bool:
        return (self.found.room or 0) >= 0


@dataclass(frozen=True)
class Row:
    """One strategy over the numbers of ranks."""

    strategy: str
    cells: dict[int, Cell]

    def ends(self) -> str:
        """Where it stops scaling, and why."""
        fitting = {world: cell for world, cell in self.cells.items() if cell.fits}
        if not fitting:
            return "fits on no number of ranks"
        first, best = min(fitting), max(cell.each for cell in fitting.values())
        begin = "" if first == 1 else f"fits from {first:,} ranks on; "
        for world, cell in fitting.items():
            if cell.each < STOPS_BELOW * best and cell.time.exposed > 0:
                share = cell.time.exposed / cell.time.total
                return f"{begin}stops at {world:,} ranks: {share:.0%} of a step waits for the {cell.time.limit}"
        return f"{begin}scales to {max(fitting):,} ranks"


def scaling(planner: Planner, recipe: Recipe, gpu: Gpu) -> list[Row]:
    """A row for each strategy. A global batch is left out: every rank keeps its own."""
    batch = recipe.batch.model_copy(update={"global_size": None, "accumulate": recipe.batch.accumulate or 1})
    recipe = recipe.model_copy(update={"batch": batch})
    rows = []
    for strategy in STRATEGIES:
        changed = with_settings(recipe, {"sharding.strategy": strategy})
        cells = {}
        for world in WORLDS:
            nodes = max(world // GPUS_IN_A_NODE, 1)
            found = planner.predict(changed, Place(world // nodes, nodes, gpu))
            if (time := step_time(found)) is not None:
                cells[world] = Cell(replace(found, moments=[found.peak]), time)
        rows.append(Row(strategy, cells))
    return rows
