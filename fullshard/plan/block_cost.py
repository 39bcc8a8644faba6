"""What one block keeps for its backward pass and needs while it runs, found on fake tensors: nothing is computed.

A compiled block is traced and cut into forward and backward as the compiler does it; any other block runs forward and
backward while the memory of its tensors is counted. Must not know models, recipes or ranks.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from fullshard.dist import recompute
from fullshard.plan import graph_memory
from fullshard.plan.live import Live, key, nbytes, tensors_in

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlockCost:
    """Bytes of one call of a block."""

    saved: int
    """Kept from forward to backward, without its inputs."""
    keeps: tuple[int, ...]
    """Which of its input tensors it keeps as well."""
    forward: int
    """The most it needs in the forward pass, with what it keeps and its output."""
    backward: int
    """The most it needs in the backward pass beyond what it kept: gradients of its parameters included."""
    output: int
    compiled: bool
    """Traced as the compiler would; otherwise counted eagerly."""


def block_cost(block: nn.Module, mode: str, given: Any, fake: Any, *, compiled: bool) -> tuple[BlockCost, Any]:
    """The cost of a block with these (args, kwargs), and its outputs. `mode` is how it is recomputed."""
    given = tree_map_only(torch.Tensor, _leaf, given)
    forward = block.forward
    recompute.apply(block, mode)
    try:
        if compiled:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch uses its own deprecated names
                    return _compiled(block, given, fake)
            except Exception:  # what cannot be traced is counted as it runs eagerly
                logger.info("the block could not be traced as the compiler does it", exc_info=True)
        with fake:
            return _eager(block, mode, given)
    finally:
        block.forward = forward


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _eager(block: nn.Module, mode: str, given: Any) -> tuple[BlockCost, Any]:
    inputs, parameters = tensors_in(given), list(block.parameters())
    read: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        read.add(key(tensor))
        return tensor

    with Live([*inputs, *parameters, *block.buffers()]) as live:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = block(*given[0], **given[1])
        forward, size = live.peak, nbytes(tensors_in(outputs))
        saved = max(live.now - size, 0)
        live.start_again()
        held = live.now
        template = tree_map_only(torch.Tensor, _copy, outputs)
        _backward(outputs, [*inputs, *parameters])
        backward = max(live.peak - held, 0)
    keeps = tuple(i for i, tensor in enumerate(inputs) if mode != "none" or key(tensor) in read)
    return BlockCost(saved, keeps, forward, backward, size, compiled=False), template


def _compiled(block: nn.Module, given: Any, fake: Any) -> tuple[BlockCost, Any]:
    from torch._functorch import config as functorch_config
    from torch._inductor.virtualized import V

    inputs, known = tensors_in(given), {key(p) for p in [*block.parameters(), *block.buffers()]}
    seen = _Seen(known, {key(tensor): index for index, tensor in enumerate(inputs)})
    torch.compiler.reset()
    with functorch_config.patch(enable_autograd_cache=False), V.set_fake_mode(fake):
        outputs = torch.compile(block, backend=_backend(seen), dynamic=False)(*given[0], **given[1])
        template = tree_map_only(torch.Tensor, _copy, outputs)
        ours = {key(tensor) for tensor in tensors_in(outputs)}
        size = nbytes(tensors_in(outputs))
        saved = sum(amount for name, amount in seen.saved.items() if name not in ours)
        _backward(outputs, [*inputs, *block.parameters()])
    torch.compiler.reset()
    keeps = tuple(sorted(seen.keeps))
    backward = max(seen.backward - saved - sum(seen.kept_bytes.values()), 0)
    return BlockCost(saved, keeps, seen.forward, backward, size, compiled=True), template


class _Seen:
    """What the graphs of one block keep, and how much memory they need."""

    def __init__(self, known: set[int], inputs: dict[int, int]) -> None:
        self.known, self.inputs = known, inputs
        self.saved: dict[int, int] = {}
        self.keeps: set[int] = set()
        self.kept_bytes: dict[int, int] = {}
        self.forward = self.backward = 0

    def run_forward(self, graph: Any, *args: Any) -> Any:
        outputs = graph(*args)
        for tensor in tensors_in(outputs):
            name = key(tensor)
            if name in self.inputs:
                self.keeps.add(self.inputs[name])
                self.kept_bytes[name] = tensor.untyped_storage().nbytes()
            elif name not in self.known:
                self.saved[name] = tensor.untyped_storage().nbytes()
        self.forward += graph_memory.peak(graph, freed=())
        return outputs

    def run_backward(self, graph: Any, *args: Any) -> Any:
        freed = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor) and key(value) not in self.known]
        self.backward = max(self.backward, graph_memory.peak(graph, freed=freed))
        return graph(*args)


def _backend(seen: _Seen) -> Any:
    """Cuts the graph as torch's compiler does for a GPU, and notes what is kept; nothing is generated."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.decomposition import select_decomp_table

    def noted(act: Callable[..., Any]) -> Callable[..., Any]:
        return lambda graph, _: make_boxed_func(lambda *args: act(graph, *args))

    return aot_autograd(
        fw_compiler=noted(seen.run_forward),
        bw_compiler=noted(seen.run_backward),
        partition_fn=partition_fn,
        decompositions=select_decomp_table(),
    )


def _backward(outputs: Any, wanted: list[torch.Tensor]) -> None:
    """The backward pass of every output that has one."""
    roots = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    needed = [tensor for tensor in wanted if tensor.requires_grad]
    if roots and needed:
        torch.autograd.grad(roots, needed, [torch.empty_like(root) for root in roots], allow_unused=True)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same kind, without memory of the first."""
    return tensor.new_empty_strided(tensor.shape, tensor.stride()).requires_grad_(tensor.requires_grad)
