"""What a block keeps, predicted on fake tensors, against what autograd really saves of real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from fullshard.dist import recompute
from fullshard.plan.block_cost import BlockCost, block_cost
from fullshard.plan.live import Live


def decoder_block(**changes: Any) -> tuple[nn.Module, Any]:
    """A real block of a small Qwen3, and its inputs."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, **changes}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**shape))
    found: list[Any] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        found.append((args, kwargs))

    block = model.model.layers[0]
    handle = block.register_forward_pre_hook(note, with_kwargs=True)
    model(input_ids=torch.zeros(2, 16, dtype=torch.int64), use_cache=False)
    handle.remove()
    args, kwargs = found[0]
    return block, ((args[0].detach().requires_grad_(), *args[1:]), kwargs)


def really_saved(block: nn.Module, given: Any, run: Any) -> tuple[int, int]:
    """Bytes that autograd saves, without parameters and inputs; and how many inputs it saves."""
    known = {p.untyped_storage().data_ptr() for p in block.parameters()}
    inputs: set[int] = set()
    tree_map_only(torch.Tensor, lambda t: inputs.add(t.untyped_storage().data_ptr()), given)
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run(*given[0], **given[1])
    output = output[0] if isinstance(output, tuple) else output
    mine = {at: t for at, t in saved.items() if at not in known | inputs | {output.untyped_storage().data_ptr()}}
    return sum(t.untyped_storage().nbytes() for t in mine.values()), len(saved.keys() & inputs)


def predicted(block: nn.Module, given: Any, mode: str, *, compiled: bool) -> BlockCost:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        for part in block.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = nn.Parameter(torch.empty(parameter.shape))
    given = tree_map_only(torch.Tensor, lambda t: fake.from_tensor(t.detach()).requires_grad_(t.requires_grad), given)
    return block_cost(block, mode, given, fake, compiled=compiled)[0]


def test_an_eager_block_keeps_what_autograd_saves() -> None:
    block, given = decoder_block()
    real, inputs = really_saved(block, given, block)
    cost = predicted(block, given, "none", compiled=False)
    assert (cost.saved, len(cost.keeps)) == (real, inputs)
    assert cost.forward >= cost.saved + cost.output


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_block_keeps_what_the_compilers_cut_leaves() -> None:
    block, given = decoder_block()
    torch.compiler.reset()
    real, inputs = really_saved(block, given, torch.compile(block, backend="aot_eager_decomp_partition"))
    torch.compiler.reset()
    cost = predicted(block, given, "none", compiled=True)
    assert cost.compiled
    assert (cost.saved, len(cost.keeps)) == (real, inputs)
    eager = predicted(decoder_block()[0], given, "none", compiled=False)
    assert cost.saved < eager.saved


@pytest.mark.parametrize("compiled", [False, True])
def test_recomputing_keeps_less_and_needs_more_in_the_backward_pass(compiled: bool) -> None:
    costs = {}
    for mode in ("none", "selective", "full"):
        block, given = decoder_block()
        costs[mode] = predicted(block, given, mode, compiled=compiled)
        assert costs[mode].compiled is compiled
    state = torch.get_rng_state().numel() if compiled else 0  # compiled attention keeps the state of the generator
    assert costs["none"].saved > costs["selective"].saved > costs["full"].saved == state
    assert costs["full"].backward > costs["none"].backward
    assert 0 in costs["full"].keeps


def test_a_block_is_left_as_it_was() -> None:
    block, given = decoder_block()
    before = block.forward
    predicted(block, given, "full", compiled=False)
    assert block.forward == before
    assert recompute.KEPT


def test_memory_counts_until_it_is_freed() -> None:
    with Live() as live:
        first = torch.zeros(1000)
        view = first[10:]
        assert live.now == 4000
        del first
        assert live.now == 4000
        del view
        assert live.now == 0
        torch.zeros(10) + torch.zeros(10)
    assert live.peak == 4000
