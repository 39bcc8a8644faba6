"""Activations of one micro-batch by block, found by one forward pass on fake tensors: nothing is computed or allocated.

Blocks that are alike are looked at once. What is outside the blocks, such as the embedding, the last norm and the loss,
runs eagerly, as it does in training. Must not know ranks, sharding strategies or time.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from fullshard.dist import keep_in_fp32, recompute
from fullshard.dist.shard import ShardPlan
from fullshard.formatting.plural import counted
from fullshard.hf.architecture.attention import use_varlen
from fullshard.kernels import custom
from fullshard.plan.block_cost import BlockCost, block_cost
from fullshard.plan.live import Live, key, tensors_in
from fullshard.plan.workload import Workload
from fullshard.recipe import Recipe
from fullshard.text import linear_cross_entropy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CalledBlock:
    """One block in one forward pass."""

    name: str
    cost: BlockCost
    kept: int
    """Bytes that stay until its backward pass, with inputs that no earlier block keeps."""


@dataclass(frozen=True)
class Activations:
    """Bytes of the activations of one micro-batch."""

    blocks: list[CalledBlock] = field(default_factory=list)
    before: int = 0
    """Kept before the first block: token ids, embedded inputs."""
    outside: int = 0
    """Kept outside the blocks in all, at the end of the forward pass: the last norm, and gradients of the head."""
    loss: int = 0
    """The most that is needed after the last block, with what is kept."""
    known: bool = False
    """The forward pass ran; otherwise nothing is known, and everything is 0."""
    notes: tuple[str, ...] = ()

    @property
    def kept(self) -> int:
        """Everything at the end of the forward pass."""
        return self.outside + sum(block.kept for block in self.blocks)


def activations(recipe: Recipe, module: nn.Module, plan: ShardPlan, work: Workload, *, gpu: bool) -> Activations:
    """The activations of one micro-batch; without them, and with a note, if the model cannot run on fake tensors."""
    notes = (work.note,) if work.note else ()
    if work.run is None:
        return Activations(notes=notes)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    computed = as_computed(module, plan, _on(fake))
    try:
        if gpu:
            _gpu_kernels(recipe, computed, plan)
        with fake, _fused_loss(gpu), custom.tracing() if gpu else contextlib.nullcontext(), torch.enable_grad():
            found = _Pass(computed, plan, fake).run(work.over)
            return replace(found, known=True, notes=(*notes, *found.notes))
    except Exception as error:
        logger.info("the forward pass on fake tensors failed", exc_info=True)
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]
        return Activations(notes=(*notes, f"activations are left out: the model does not run without data ({reason})"))


def as_computed(
    module: nn.Module,
    plan: ShardPlan,
    made: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
    *,
    without: Collection[str] = (),
) -> nn.Module:
    """A copy of the module in the dtypes that it computes in. `made` gives what replaces a parameter or buffer; ties
    stay ties. Modules `without` are left as they are."""
    found, known = copy.deepcopy(module), dict[nn.Parameter, nn.Parameter]()
    exact = {id(p) for unit in plan.wrap.exact for p in found.get_submodule(unit).parameters()}
    for path, part in found.named_modules():
        if keep_in_fp32.within(path, without):
            continue
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            if parameter not in known:
                dtype = torch.float32 if id(parameter) in exact else plan.compute
                known[parameter] = nn.Parameter(made(parameter, dtype), requires_grad=parameter.requires_grad)
            part._parameters[name] = known[parameter]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = made(buffer, buffer.dtype)
    _cast_at_units(found, plan)
    return found.train()


def _on(fake: FakeTensorMode) -> Callable[[torch.Tensor, torch.dtype], torch.Tensor]:
    def made(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with fake:
            return torch.empty(tensor.shape, dtype=dtype)

    return made


def _cast_at_units(module: nn.Module, plan: ShardPlan) -> None:
    """Inputs of units have the dtype that each computes in, as FSDP casts them; exact ones stay as they are."""
    inner = keep_in_fp32.timed_in_blocks(module, plan.wrap.blocks, plan.wrap.units)
    for name in ["", *plan.wrap.units, *inner]:
        exact = name in plan.wrap.exact
        part = module.get_submodule(name)
        keep_in_fp32.cast_inputs(part, torch.float32 if exact else plan.compute)
        if exact:
            part.register_forward_hook(lambda _, inputs, output: _cast(output, plan.compute))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def _gpu_kernels(recipe: Recipe, module: nn.Module, plan: ShardPlan) -> None:
    """The kernels that a GPU of compute capability 8.0 would get."""
    model: Any = module
    if not hasattr(model, "_supports_attention_backend"):
        recipe.model.choose_kernels(module, device="cuda", compute=plan.compute, packed=bool(recipe.data.pack))
        return
    half, asked = plan.compute in (torch.bfloat16, torch.float16), recipe.model.attention_kernel()
    able = half and getattr(model, "_supports_attention_backend", False)
    if able and (asked == "varlen" or (asked == "auto" and recipe.data.pack)):
        use_varlen(module)


@contextlib.contextmanager
def _fused_loss(gpu: bool) -> Iterator[None]:
    """On a GPU the loss is compiled: of a chunk only its logits and their gradient reach memory."""
    before = linear_cross_entropy._loss_and_gradient
    if gpu:
        linear_cross_entropy._loss_and_gradient = lambda needs_grad, compiled: _fused
    try:
        yield
    finally:
        linear_cross_entropy._loss_and_gradient = before


def _fused(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    none = torch.zeros((), dtype=torch.float32)
    return none, none, torch.empty_like(logits)


class _Pass:
    """One forward pass, in which every block answers with its cost instead of running."""

    def __init__(self, module: nn.Module, plan: ShardPlan, fake: FakeTensorMode) -> None:
        self._module, self._plan, self._fake = module, plan, fake
        self._costs: dict[Any, tuple[BlockCost, Any]] = {}
        self._blocks: list[CalledBlock] = []
        self._kept: set[int] = set()
        self._held: list[torch.Tensor] = []
        self._before = 0
        self._live = Live([*module.parameters(), *module.buffers()])

    def run(self, act: Callable[[nn.Module], Any]) -> Activations:
        for name in self._plan.wrap.blocks:
            block = self._module.get_submodule(name)
            block.forward = self._instead_of(name, block)  # type: ignore[method-assign]
        with self._live:
            found = act(self._module)  # keeps what its backward pass needs
            inputs = sum(block.kept - block.cost.saved for block in self._blocks)
            # What blocks keep of their inputs lives here too, as the outputs of blocks before.
            outside = max(self._live.now - inputs, 0)
            highest = max(self._live.peak - inputs, outside)
        del found
        idle = len(set(self._plan.wrap.blocks) - {block.name for block in self._blocks})
        note = f"{counted(idle, 'block')} did not run, as of an image or audio tower: their activations are not counted"
        return Activations(self._blocks, self._before, outside, highest, notes=(note,) if idle else ())

    def _instead_of(self, name: str, block: nn.Module) -> Callable[..., Any]:
        forward = block.forward

        def answer(*args: Any, **kwargs: Any) -> Any:
            if not self._blocks:
                self._before = self._live.now
            cost, outputs = self._cost(name, block, forward, args, kwargs)
            given = tensors_in((args, kwargs))
            new = {key(given[i]): given[i].untyped_storage().nbytes() for i in cost.keeps}
            kept = cost.saved + sum(size for at, size in new.items() if at not in self._kept)
            self._kept |= set(new)
            self._blocks.append(CalledBlock(name, cost, kept))
            self._held += [given[i] for i in cost.keeps]
            result = tree_map_only(torch.Tensor, _fresh, outputs)
            self._live.start_again()
            return result

        return answer

    def _cost(self, name: str, block: nn.Module, forward: Any, args: Any, kwargs: Any) -> tuple[BlockCost, Any]:
        """Looked up by what decides it: the class, shapes of parameters and inputs, and what needs a gradient."""
        plan = self._plan
        mode = recompute.of_block(name, plan.recompute.get(name, plan.activation_checkpointing), plan.wrap.units)
        tensors = [*block.parameters(), *tensors_in((args, kwargs))]
        shapes = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        same = (type(block), mode, shapes)
        if same not in self._costs:
            answer, block.forward = block.forward, forward  # type: ignore[method-assign]
            with _disable_current_modes():  # the compiler looks at nothing inside a mode
                self._costs[same] = block_cost(block, mode, (args, kwargs), self._fake, compiled=plan.compile)
            block.forward = answer  # type: ignore[method-assign]
        return self._costs[same]


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty_strided(tensor.shape, tensor.stride()).requires_grad_(tensor.requires_grad)
