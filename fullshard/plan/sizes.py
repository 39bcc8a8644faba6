"""Bytes that one rank holds from step to step: parameters, gradients, optimizer state and averages. Exact arithmetic.

FSDP cuts dim 0 of every parameter into equal chunks and pads the last ones, so the memory of a parameter and of its
gradient is the same on all ranks; states have only the rows that a rank really has. Must not know activations, time or
how anything is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fullshard.contracts.optimizer import Optimizer
from fullshard.dist.shard import ShardPlan, store
from fullshard.dist.wrap import unit_parameters
from fullshard.optim.adamw import AdamW
from fullshard.optim.adamw_8bit import AdamW8bit
from fullshard.optim.muon import Muon
from fullshard.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

STEP = 4
"""Bytes of the step count that Adam keeps beside each parameter."""
QUANTISED_FROM, BLOCK, TABLE = 4096, 256, 1024
"""torchao quantises states of at least this many values, with a scale per block, and a table of 256 values each."""


@dataclass(frozen=True)
class TensorSize:
    """One parameter."""

    name: str
    rows: int
    width: int
    """Values in a row: everything but dim 0."""
    itemsize: int
    """Bytes of a stored value."""
    trained: bool
    dims: int

    @property
    def numel(self) -> int:
        return self.rows * self.width

    def chunk(self, shards: int) -> int:
        """Values in the memory of each rank, padding included."""
        return -(-self.rows // shards) * self.width

    def mine(self, shards: int, index: int = 0) -> int:
        """Values that shard `index` really has; shard 0 never has fewer than another."""
        rows = -(-self.rows // shards)
        return max(min(self.rows - index * rows, rows), 0) * self.width


@dataclass(frozen=True)
class UnitSize:
    """One FSDP unit: what is gathered and reduced together."""

    name: str
    """As in the model; empty for the root."""
    tensors: tuple[TensorSize, ...]
    compute: int
    """Bytes of a gathered value."""

    @property
    def trained(self) -> tuple[TensorSize, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.trained)

    def parameters(self, shards: int) -> int:
        return sum(tensor.chunk(shards) * tensor.itemsize for tensor in self.tensors)

    def gradients(self, shards: int) -> int:
        """The reduced gradients, which have the dtype of the stored parameters."""
        return sum(tensor.chunk(shards) * tensor.itemsize for tensor in self.trained)

    def gathered(self, shards: int) -> int:
        """The whole unit in the dtype that it computes in."""
        return sum(tensor.chunk(shards) * shards for tensor in self.tensors) * self.compute

    def whole_gradients(self) -> int:
        """What the backward pass leaves before it is reduced."""
        return sum(tensor.numel for tensor in self.trained) * self.compute

    def reduced(self, shards: int) -> int:
        """The fp32 input of the reduce-scatter."""
        return 4 * sum(tensor.chunk(shards) * shards for tensor in self.trained)


@dataclass(frozen=True)
class Held:
    """What one rank holds from step to step, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    ema: int
    buffers: int = 0
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def between_steps(self) -> int:
        """Gradients are freed after each update."""
        return self.parameters + self.optimizer + self.ema + self.buffers


def unit_sizes(module: nn.Module, plan: ShardPlan, recipe: Recipe) -> list[UnitSize]:
    """The units of a module on meta, in forward order with the root last. Casts the module to its storage dtypes."""
    store(module, plan, recipe.model)
    parameters = dict(module.named_parameters())
    found = []
    for unit, names in unit_parameters(module, plan.wrap).items():
        tensors = tuple(
            TensorSize(
                name=name,
                rows=p.shape[0],
                width=p.numel() // max(p.shape[0], 1),
                itemsize=p.element_size(),
                trained=p.requires_grad,
                dims=p.dim(),
            )
            for name, p in ((name, parameters[name]) for name in names)
        )
        if tensors:
            found.append(UnitSize(unit, tensors, 4 if unit in plan.wrap.exact else plan.compute.itemsize))
    return found


def held(recipe: Recipe, units: Sequence[UnitSize], *, shards: int, index: int = 0, buffers: int = 0) -> Held:
    """What the rank with shard `index` holds. Shard 0 holds the most."""
    trained = [tensor for unit in units for tensor in unit.trained]
    return Held(
        parameters=sum(unit.parameters(shards) for unit in units),
        gradients=sum(unit.gradients(shards) for unit in units),
        optimizer=optimizer_state(recipe.optimizer, trained, shards=shards, index=index),
        ema=sum(4 * tensor.mine(shards, index) for tensor in trained) if recipe.ema else 0,
        buffers=buffers,
    )


def optimizer_state(optimizer: Optimizer, trained: Sequence[TensorSize], *, shards: int, index: int = 0) -> int:
    """Bytes of the states of one rank."""
    if isinstance(optimizer, AdamW8bit):
        return sum(STEP + 2 * _quantised(tensor, tensor.mine(shards, index)) for tensor in trained)
    if isinstance(optimizer, Muon):
        taken = optimizer.taken([(tensor.name, tensor.dims) for tensor in trained])
        matrices = [tensor for tensor in trained if tensor.name in taken]
        momentum = sum(tensor.mine(shards, index) * tensor.itemsize for tensor in matrices)
        return momentum + _adam((t for t in trained if t.name not in taken), shards, index)
    if isinstance(optimizer, AdamW):
        return _adam(trained, shards, index)
    return sum(tensor.mine(shards, index) * optimizer.state_bytes(tensor.itemsize) for tensor in trained)


def _adam(trained: Iterable[TensorSize], shards: int, index: int) -> int:
    """Two moments in the dtype of the parameter."""
    return sum(STEP + 2 * tensor.mine(shards, index) * tensor.itemsize for tensor in trained)


def _quantised(tensor: TensorSize, values: int) -> int:
    """One 8-bit state of torchao."""
    if values >= QUANTISED_FROM and values % BLOCK == 0:
        return values + 4 * (values // BLOCK) + TABLE
    return values * tensor.itemsize


def checkpoint_bytes(recipe: Recipe, units: Sequence[UnitSize]) -> int:
    """One checkpoint: weights, states and averages, without frozen weights that the model's own folder holds."""
    trained = [tensor for unit in units for tensor in unit.trained]
    frozen = [tensor for unit in units for tensor in unit.tensors if not tensor.trained]
    kept = trained if frozen and recipe.model.stored_in() is not None else [*trained, *frozen]
    weights = sum(tensor.numel * tensor.itemsize for tensor in kept)
    averages = sum(4 * tensor.numel for tensor in trained) if recipe.ema else 0
    return weights + averages + optimizer_state(recipe.optimizer, trained, shards=1)
