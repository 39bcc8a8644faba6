"""Memory over a step: its order, and what changes it. Numbers by hand for two units of equal size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fullshard.plan.activations import Activations, CalledBlock
from fullshard.plan.block_cost import BlockCost
from fullshard.plan.moments import Layout, Moment, Step, peak
from fullshard.plan.sizes import Held, TensorSize, UnitSize

COST = BlockCost(saved=90, keeps=(0,), forward=150, backward=40, output=10, compiled=True)


def unit(name: str) -> UnitSize:
    """8 rows of 100 values, stored in fp32 and computed in bf16."""
    return UnitSize(name, (TensorSize(f"{name}.w", 8, 100, 4, trained=True, dims=2),), 2)


def step(shards: int, **changes: object) -> Step:
    units = [unit("a"), unit("b"), unit("")]
    held = Held(parameters=3 * 3200 // shards, gradients=3 * 3200 // shards, optimizer=6 * 3200 // shards, ema=0)
    blocks = [CalledBlock("a", COST, 100), CalledBlock("b", COST, 100)]
    seen = Activations(blocks, before=5, outside=20, loss=70)
    layout = replace(Layout(shards, True, False, False, 1), **changes)  # type: ignore[arg-type]
    return Step(units, held, seen, layout, update=7, batch=0)


def at(moments: list[Moment], name: str) -> Moment:
    return next(moment for moment in moments if moment.name == name)


def test_a_step_goes_forward_and_back_and_ends_with_the_update() -> None:
    names = [moment.name for moment in step(4).moments()]
    assert names == ["start", "forward of a", "forward of b", "loss", "backward of b", "reduce of b"] + [
        *("backward of a", "reduce of a", "reduce of the root", "update")
    ]


def test_bytes_of_each_moment() -> None:
    moments = step(4).moments()
    # The root stays gathered; a unit is gathered into a buffer, and copied out.
    assert at(moments, "forward of b").memory.gathered == 1600 + 2 * 1600
    assert at(moments, "forward of b").memory.activations == 5 + 2 * 100
    assert at(moments, "loss").memory.activations == 2 * 100 + 20
    assert at(moments, "loss").memory.working == 70 - 20
    # In the backward pass the unit itself, and the next one that is being gathered.
    assert at(moments, "backward of b").memory.gathered == 1600 + 2 * 1600
    # Gradients in bf16, the same in fp32 to be reduced, and the slice that results.
    assert at(moments, "reduce of b").memory.reduced == 1600 + 3200 + 800
    # That buffer lives until the next reduction; only the slice counts as a gradient.
    assert (at(moments, "backward of a").memory.reduced, at(moments, "backward of a").memory.gradients) == (3200, 800)
    assert at(moments, "update").memory.total == (3 + 3 + 6) * 800 + 7


def test_one_rank_gathers_and_reduces_in_place() -> None:
    moments = step(1).moments()
    assert at(moments, "forward of b").memory.gathered == 1600 + 1600
    assert at(moments, "reduce of b").memory.reduced == 1600 + 3200
    assert at(moments, "backward of a").memory.reduced == 0


def test_gradients_of_earlier_micro_batches_are_there_all_the_time() -> None:
    once, more = step(4).moments(), step(4, accumulate=2).moments()
    assert at(more, "loss").memory.gradients == 3 * 800
    assert at(more, "loss").memory.total == at(once, "loss").memory.total + 3 * 800


def test_parameters_that_stay_gathered_cost_memory() -> None:
    """So grad_op is never advice against a lack of memory."""
    full, kept = step(4).moments(), step(4, reshard=False).moments()
    assert at(kept, "loss").memory.total == at(full, "loss").memory.total + 2 * 1600
    assert peak(kept).memory.total >= peak(full).memory.total
    assert at(kept, "loss").memory.gathered == 3 * 1600


@pytest.mark.parametrize("name", ["start", "loss", "update"])
def test_offloaded_state_is_not_on_the_device(name: str) -> None:
    memory = at(step(4, offload=True).moments(), name).memory
    assert (memory.parameters, memory.optimizer, memory.gradients) == (0, 0, 0)


def test_prefetching_holds_the_next_unit_too() -> None:
    assert at(step(4, prefetch=True).moments(), "forward of a").memory.gathered == 1600 + 3 * 1600
