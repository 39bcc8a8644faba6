"""What was measured of the parts of a model, and what follows from it for other rows: seconds, and bytes by block.

Must not know how it was measured, sharding, ranks, or how anything is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fullshard.dist.shard import ShardPlan
from fullshard.plan.activations import Activations, CalledBlock
from fullshard.plan.workload import Workload
from fullshard.recipe import Recipe


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of a part: seconds and bytes."""

    tokens: int
    """Tokens (or images) in memory at a time."""
    forward: float
    backward: float
    kept: float = 0.0
    """From forward to backward, without inputs and outputs. No bytes are known on a CPU."""
    forward_needs: float = 0.0
    """The most while it runs, with what it keeps."""
    backward_needs: float = 0.0
    """The most beyond what it kept."""


@dataclass(frozen=True)
class Part:
    """A kind of block, or what is outside the blocks."""

    name: str
    calls: int
    """In one forward pass."""
    whole: Pass
    other: Pass
    """With half the rows, or half the length of a single one."""

    def at(self, tokens: int) -> Pass:
        """With other rows: a constant, and a share for each token."""
        numbers = ("forward", "backward", "kept", "forward_needs", "backward_needs")
        return Pass(tokens, **{name: self._line(name, tokens) for name in numbers})

    def _line(self, name: str, tokens: int) -> float:
        whole, other = self.whole, self.other
        end = getattr(whole, name)
        slope = (end - getattr(other, name)) / (whole.tokens - other.tokens)
        # Neither part is negative: attention grows with the square of a length, and times scatter.
        return float(end + min(max(slope, 0.0), end / whole.tokens) * (tokens - whole.tokens))


@dataclass(frozen=True)
class Measured:
    """What was measured for one recipe. It holds for any rows, and for any ranks and strategy."""

    device: str
    counts_bytes: bool
    of: str
    """The `settings` that were measured."""
    work: Workload
    seen: Activations
    """What the plan had modelled."""
    kinds: tuple[Part, ...]
    order: tuple[int, ...]
    """The kind of each block that a forward pass calls."""
    outside: Part
    modelled: float | None
    """The seconds that the plan had modelled for the micro-batch; None: unknown."""

    def seconds(self, work: Workload) -> float:
        """Of computing one micro-batch. In several chunks the forward pass runs twice."""
        parts = [(part.at(work.tokens), part.calls) for part in (*self.kinds, self.outside)]
        chunks = (work.whole or work.rows) / work.rows
        again = 2 if chunks > 1 else 1
        return chunks * sum(calls * (again * found.forward + found.backward) for found, calls in parts)

    def ratio(self) -> float:
        """Real seconds for each modelled one: corrects what is modelled for other settings of this recipe."""
        return self.seconds(self.work) / self.modelled if self.modelled else 1.0

    def was_modelled(self) -> list[Pass]:
        """The bytes that the plan had modelled of each kind, and of what is outside."""
        costs = [self.seen.blocks[self.order.index(kind)].cost for kind in range(len(self.kinds))]
        tokens, seen = self.work.tokens, self.seen
        found = [Pass(tokens, 0.0, 0.0, cost.saved, cost.forward, cost.backward) for cost in costs]
        return [*found, Pass(tokens, 0.0, 0.0, seen.outside, seen.loss, max(seen.loss - seen.outside, 0))]

    def over(self, seen: Activations, recipe: Recipe, plan: ShardPlan, tokens: int) -> Activations:
        """Activations with the measured bytes, if these settings were measured."""
        same = self.holds(recipe, plan) and len(seen.blocks) == len(self.order)
        if not (self.counts_bytes and same):
            return seen
        costs, outside = [part.at(tokens) for part in self.kinds], self.outside.at(tokens)
        blocks = [_with(block, costs[kind]) for block, kind in zip(seen.blocks, self.order, strict=True)]
        highest = max(outside.forward_needs, outside.kept + outside.backward_needs)
        return replace(seen, blocks=blocks, outside=int(outside.kept), loss=int(highest))

    def holds(self, recipe: Recipe, plan: ShardPlan) -> bool:
        """Whether blocks of this recipe compute as those that were measured."""
        return self.of == settings(recipe, plan)


def _with(block: CalledBlock, found: Pass) -> CalledBlock:
    kept, forward, backward = int(found.kept), int(found.forward_needs), int(found.backward_needs)
    cost = replace(block.cost, saved=kept, forward=forward, backward=backward)
    return replace(block, cost=cost, kept=kept + block.kept - block.cost.saved)


def settings(recipe: Recipe, plan: ShardPlan) -> str:
    """What decides how a block computes, but for the rows."""
    how = (plan.compute, plan.float8, plan.compile, plan.activation_checkpointing, dict(plan.recompute))
    return repr((recipe.model, recipe.data.pack, recipe.data.sequence_length, *how))
