"""Times and memory of the parts of a model, measured on a device of this machine: one block of each kind, and what is
outside the blocks, forward and backward, with two sizes of the micro-batch.

The model runs with blocks that only hand on outputs of the right shape: this shows what blocks are called with, and is
what is outside of them. Weights are random. Must not know sharding, ranks, or how anything is predicted or shown.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from fullshard.dist import recompute
from fullshard.dist.shard import ShardPlan
from fullshard.errors import FullshardError, SetupError, one_line
from fullshard.plan.activations import Activations, as_computed
from fullshard.plan.live import tensors_in
from fullshard.plan.measured import Measured, Part, Pass, settings
from fullshard.plan.real_pass import real_pass
from fullshard.plan.workload import Workload
from fullshard.recipe import Recipe


def measure(
    recipe: Recipe,
    module: nn.Module,
    plan: ShardPlan,
    work: Workload,
    seen: Activations,
    *,
    device: torch.device,
    sharing: int,
    modelled: float | None,
) -> Measured:
    """Measures each kind of block in `seen`, and what is outside the blocks. `module` is on meta; `sharing`: ranks that
    share a CPU."""
    if not seen.blocks:
        why = f" {'; '.join(seen.notes)}." if seen.notes else ""
        raise SetupError(f"--measure: no block of this model runs without data.{why} Plan without --measure.")
    with _named(device, work), _alone(device, sharing):
        model = _Model(recipe, module, plan, seen, device)
        passes = [_passes(model, size) for size in (work, _other(work))]
        del model
    on_gpu, order = device.type == "cuda", _kinds(seen)
    first = [seen.blocks[order.index(kind)].name for kind in range(max(order) + 1)]
    names = [*(type(module.get_submodule(name)).__name__ for name in first), "outside the blocks"]
    *kinds, outside = map(Part, names, [*(order.count(kind) for kind in range(len(first))), 1], *passes)
    return Measured(
        device=torch.cuda.get_device_name(device) if on_gpu else "a CPU",
        counts_bytes=on_gpu,
        of=settings(recipe, plan),
        work=work,
        seen=seen,
        kinds=tuple(kinds),
        order=tuple(order),
        outside=outside,
        modelled=modelled,
    )


@contextlib.contextmanager
def _named(device: torch.device, work: Workload) -> Iterator[None]:
    """What fails inside is an error that says what to do."""
    where = "GPU" if device.type == "cuda" else "machine"
    size = f"{work.rows:,} x {work.length:,} {work.noun}s" if work.length > 1 else f"{work.rows:,} {work.noun}s"
    try:
        yield
    except FullshardError:
        raise
    except Exception as error:
        # A CPU's allocator raises no class of its own.
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise SetupError(
                f"--measure: {size} in one block, or in the head, do not fit into the memory of this {where}. "
                "Use a smaller batch.per_device or data.sequence_length, or plan without --measure."
            ) from error
        raise SetupError(
            f"--measure: a block of this model cannot be run alone ({one_line(error)}). Plan without --measure."
        ) from error


@contextlib.contextmanager
def _alone(device: torch.device, sharing: int) -> Iterator[None]:
    """Kernels start on this device, and a CPU has the threads of one rank. Frees the memory at the end."""
    threads = torch.get_num_threads()
    try:
        if device.type == "cuda":
            with torch.cuda.device(device):
                yield
        else:
            torch.set_num_threads(max(threads // sharing, 1))
            yield
    finally:
        torch.set_num_threads(threads)
        gc.collect()  # blocks and what stands in their place refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _other(work: Workload) -> Workload:
    """Half the rows, or half the length of a single one; of a single image two."""
    if work.rows > 1:
        return replace(work, rows=work.rows // 2)
    return replace(work, length=work.length // 2) if work.length > 1 else replace(work, rows=2)


def _kinds(seen: Activations) -> list[int]:
    """The kind of each block: the plan looked at equal ones once."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(id(block.cost), len(numbers)) for block in seen.blocks]


def _passes(model: _Model, work: Workload) -> list[Pass]:
    """Of each kind of block, then of what is outside."""
    batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(model.device), work.batch(work.rows, work.length))
    model.calls.clear()
    forward = functools.partial(model.outside, work, batch)
    outside = real_pass(model.device, work.tokens, model.parameters, forward)
    return [*(model.block(call, work.tokens) for _, call in sorted(model.calls.items())), outside]


@dataclass(frozen=True)
class _Call:
    """The first call of a kind of block."""

    name: str
    given: Any
    outputs: Any


class _Model:
    """The model on the device, with one real block of each kind. In place of blocks, their outputs are handed on."""

    def __init__(
        self, recipe: Recipe, module: nn.Module, plan: ShardPlan, seen: Activations, device: torch.device
    ) -> None:
        self.plan, self.device, self._kinds = plan, device, _kinds(seen)
        real = {seen.blocks[self._kinds.index(kind)].name for kind in self._kinds}
        unused = [name for name in plan.wrap.blocks if name not in real]
        self._module = as_computed(module, plan, lambda tensor, dtype: _random(tensor, dtype, device), without=unused)
        packed = bool(recipe.data.pack)
        recipe.model.choose_kernels(self._module, device=device.type, compute=plan.compute, packed=packed)
        if plan.float8:
            plan.float8.convert(self._module, plan.wrap.blocks, plan.wrap.exact)
        self.parameters = [parameter for parameter in self._module.parameters() if not parameter.is_meta]
        self.calls: dict[int, _Call] = {}
        self._inputs: dict[int, torch.Tensor] | None = None
        self._at = 0
        self._forwards = {name: self._module.get_submodule(name).forward for name in plan.wrap.blocks}
        for name in plan.wrap.blocks:
            self._module.get_submodule(name).forward = self._instead_of(name)  # type: ignore[method-assign]

    def _instead_of(self, name: str) -> Callable[..., Any]:
        block = self._module.get_submodule(name)

        def answer(*args: Any, **kwargs: Any) -> Any:
            kind, given = self._kinds[self._at], tensors_in((args, kwargs))
            self._at += 1
            if kind not in self.calls:
                with torch.no_grad():
                    outputs = self._forwards[name](*args, **kwargs)
                self.calls[kind] = _Call(name, *tree_map_only(torch.Tensor, _leaf, ((args, kwargs), outputs)))
            if self._inputs is not None:
                self._inputs |= {id(tensor): tensor for tensor in given if tensor.grad_fn is not None}
            learns = any(tensor.requires_grad for tensor in (*block.parameters(), *given))
            last = self._at == len(self._kinds)
            if last and self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)

            def handed(tensor: torch.Tensor) -> torch.Tensor:
                # What follows may keep the last one; all others are kept by blocks.
                found = tensor.clone() if last else tensor.detach()
                return found.requires_grad_(learns and tensor.is_floating_point())

            return tree_map_only(torch.Tensor, handed, self.calls[kind].outputs)

        return answer

    def outside(self, work: Workload, batch: Any, inputs: bool) -> list[torch.Tensor]:
        """Runs what is outside the blocks: the loss, and with `inputs` those of blocks, which have a backward pass."""
        assert work.run is not None
        self._at, self._inputs = 0, {} if inputs else None
        loss = work.run(self._module, batch)
        found, self._inputs = [loss, *(self._inputs or {}).values()], None
        if self._at != len(self._kinds):
            raise RuntimeError(f"{self._at} blocks ran instead of {len(self._kinds)}")
        return found

    def block(self, call: _Call, tokens: int) -> Pass:
        """Measures a block, recomputed and compiled as in the run."""
        block, plan = self._module.get_submodule(call.name), self.plan
        instead, block.forward = block.forward, self._forwards[call.name]  # type: ignore[method-assign]
        asked = plan.recompute.get(call.name, plan.activation_checkpointing)
        recompute.apply(block, recompute.of_block(call.name, asked, plan.wrap.units))
        if plan.compile:
            torch.compiler.reset()  # after another size or kind the compiler would allow for any size
        run: Any = torch.compile(block._call_impl) if plan.compile else block
        args, kwargs = call.given
        leaves = [*block.parameters(), *tensors_in(call.given)]
        try:
            return real_pass(self.device, tokens, leaves, lambda _: tensors_in(run(*args, **kwargs)), hands_on=True)
        finally:
            block.forward = instead  # type: ignore[method-assign]


def _random(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not tensor.is_meta:  # a buffer
        return tensor.to(device)
    empty = torch.empty(tensor.shape, dtype=dtype, device=device)
    return empty.normal_(std=0.02) if tensor.dim() > 1 else empty.fill_(1.0)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
