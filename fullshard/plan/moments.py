"""The memory of one rank over one step, moment by moment: what is held, gathered, kept and needed for a short time.

The order is that of FSDP: a unit is gathered before it runs and freed after it; in the backward pass the next one is
gathered ahead, gradients are copied to one fp32 buffer and reduced, and that buffer lives until the next unit is
reduced. Must not know recipes, how costs are found, or time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from fullshard.plan.activations import Activations, CalledBlock
from fullshard.plan.sizes import Held, UnitSize


@dataclass(frozen=True)
class Memory:
    """Bytes by kind."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    ema: int = 0
    buffers: int = 0
    gathered: int = 0
    """Whole units, and those being gathered."""
    reduced: int = 0
    """Buffers of the reduction."""
    activations: int = 0
    working: int = 0
    """Needed for a short time: inside a block, for the loss, or for the update."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Moment:
    """One point of a step."""

    name: str
    memory: Memory


@dataclass(frozen=True)
class Layout:
    """How units are held and sent."""

    shards: int
    reshard: bool
    """Units are freed after their forward pass."""
    prefetch: bool
    """The next unit is gathered before this one has run, also in the forward pass."""
    offload: bool
    accumulate: int
    reduce_once: bool = False
    """A micro-batch runs in chunks, whose gradients add up unreduced, in fp32, before they are reduced."""


@dataclass(frozen=True)
class Step:
    """What a step is made of."""

    units: Sequence[UnitSize]
    held: Held
    activations: Activations
    layout: Layout
    update: int
    """What the optimizer needs for a short time."""
    batch: int
    """The micro-batch itself."""

    def moments(self) -> list[Moment]:
        """The step, from its start to the update."""
        return [*self._forward(), *self._backward(), self._update()]

    @property
    def _blocks(self) -> list[tuple[CalledBlock | None, UnitSize | None]]:
        """Blocks in the order they run, with their units; without a forward pass, the units alone."""
        units = {unit.name: unit for unit in self.units}
        called = self.activations.blocks
        if not called:
            return [(None, unit) for unit in self.units if unit.name]
        return [(block, units.get(block.name)) for block in called]

    @property
    def _outside(self) -> list[UnitSize]:
        """Units that are no blocks and not the root: embeddings, parts that compute in fp32."""
        blocks = {block.name for block, _ in self._blocks if block} or {unit.name for _, unit in self._blocks if unit}
        return [unit for unit in self.units if unit.name and unit.name not in blocks]

    @property
    def _root(self) -> int:
        """The root stays gathered from its forward to its backward pass."""
        return sum(unit.gathered(self.layout.shards) for unit in self.units if not unit.name)

    def _base(self) -> Memory:
        """Held at any time. Gradients of earlier micro-batches are there from the second on."""
        held, offload = self.held, self.layout.offload
        earlier = held.gradients if self.layout.accumulate > 1 else 0
        whole = sum(4 * tensor.numel for unit in self.units for tensor in unit.trained)
        unreduced = whole if self.layout.reduce_once else 0
        kept = Memory(buffers=held.buffers + self.batch, gathered=self._root, reduced=unreduced)
        if offload:
            return kept
        return replace(kept, parameters=held.parameters, optimizer=held.optimizer, ema=held.ema, gradients=earlier)

    def _in_flight(self, unit: UnitSize | None) -> int:
        """The buffer that a unit is gathered into; one rank gathers in place."""
        return unit.gathered(self.layout.shards) if unit and self.layout.shards > 1 else 0

    def _forward(self) -> Iterator[Moment]:
        base, shards, seen = self._base(), self.layout.shards, self.activations
        stay = sum(unit.gathered(shards) for unit in self._outside) if not self.layout.reshard else 0
        yield Moment("start", base)
        embedding = sum(unit.gathered(shards) + self._in_flight(unit) for unit in self._outside)
        if self._outside:
            yield Moment("embedding", _plus(base, gathered=embedding, activations=seen.before))
        kept, blocks = seen.before, self._blocks
        for index, (block, unit) in enumerate(blocks):
            following = blocks[index + 1][1] if index + 1 < len(blocks) else None
            whole = unit.gathered(shards) if unit else 0
            ahead = self._in_flight(following) if self.layout.prefetch else 0
            working = max(block.cost.forward - block.cost.saved, 0) if block else 0
            kept += block.kept if block else 0
            yield Moment(
                f"forward of {block.name if block else unit.name if unit else ''}",
                _plus(
                    base,
                    gathered=stay + whole + self._in_flight(unit) + ahead,
                    activations=kept,
                    working=working,
                ),
            )
            stay += whole if not self.layout.reshard else 0
        blocks_kept = sum(block.kept for block, _ in blocks if block)
        yield Moment(
            "loss",
            _plus(base, gathered=stay, activations=blocks_kept + seen.outside, working=seen.loss - seen.outside),
        )

    def _backward(self) -> Iterator[Moment]:
        base, shards, blocks = self._base(), self.layout.shards, self._blocks
        everything = sum(unit.gathered(shards) for unit in self.units if unit.name)
        kept = sum(block.kept for block, _ in blocks if block)
        # The gradient of the head is among what the loss keeps; it becomes the root's, which is reduced last.
        outside, done, before = self.activations.outside, 0, 0
        for index in reversed(range(len(blocks))):
            block, unit = blocks[index]
            previous = blocks[index - 1][1] if index else None
            whole = (unit.gathered(shards) if unit else 0) + self._in_flight(previous)
            gathered = whole if self.layout.reshard else everything
            name = block.name if block else unit.name if unit else ""
            now = _plus(base, gathered=gathered, activations=kept + outside, reduced=before)
            now = self._with_gradients(now, done)
            yield Moment(f"backward of {name}", _plus(now, working=block.cost.backward if block else 0))
            kept -= block.kept if block else 0
            after = self._reduce(unit)
            if unit and unit.trained:
                gathered -= whole if self.layout.reshard else unit.gathered(shards)
                everything -= unit.gathered(shards)
                now = replace(now, activations=kept + outside, gathered=base.gathered + max(gathered, 0))
                now = replace(now, reduced=base.reduced + after + unit.whole_gradients() + unit.gradients(shards))
                yield Moment(f"reduce of {name}", now)
                done, before = done + unit.gradients(shards), after if shards > 1 else 0
        for unit in [*self._outside, *(unit for unit in self.units if not unit.name)]:
            if unit.trained:
                now = self._with_gradients(_plus(base, activations=self.activations.before), done)
                reduced = self._reduce(unit) + unit.whole_gradients() + unit.gradients(shards)
                gathered = max(base.gathered - self._root, 0) + unit.gathered(shards)
                now = replace(now, reduced=now.reduced + reduced, gathered=gathered)
                yield Moment(f"reduce of {unit.name or 'the root'}", now)
                done += unit.gradients(shards)

    def _reduce(self, unit: UnitSize | None) -> int:
        """The fp32 input of the reduction. On one rank it becomes the gradient itself, unless weights are in bf16."""
        if unit is None or not unit.trained:
            return 0
        own = self.layout.shards == 1 and all(tensor.itemsize == 4 for tensor in unit.trained)
        return unit.reduced(self.layout.shards) - (unit.gradients(1) if own else 0)

    def _with_gradients(self, memory: Memory, done: int) -> Memory:
        """Gradients that are reduced already; offloaded ones are in host memory."""
        if self.layout.offload or self.layout.accumulate > 1:
            return memory
        return replace(memory, gradients=done)

    def _update(self) -> Moment:
        held = self.held
        if self.layout.offload:
            return Moment("update", Memory(buffers=held.buffers + self.batch))
        base = replace(self._base(), gathered=0, reduced=0)
        return Moment("update", replace(base, gradients=held.gradients, working=self.update))


def _plus(memory: Memory, **more: int) -> Memory:
    return replace(memory, **{name: getattr(memory, name) + amount for name, amount in more.items()})


def peak(moments: Sequence[Moment]) -> Moment:
    """The moment that needs the most memory."""
    return max(moments, key=lambda moment: moment.memory.total)
