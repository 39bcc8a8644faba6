"""Activation checkpointing: the same gradients, fewer kept activations, and still one compiled graph per block."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, Qwen3Config

from fullshard.dist import recompute
from tests.near import assert_near

CONFIG = Qwen3Config(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG)  # type: ignore[no-any-return]


def gradients(model: torch.nn.Module) -> tuple[list[torch.Tensor], int]:
    """Gradients of one step, and the elements that autograd kept for it."""
    kept = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    ids = torch.arange(32).reshape(2, 16)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, use_cache=False).logits.square().mean()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None], kept


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_same_gradients_with_less_kept(model: torch.nn.Module, mode: str) -> None:
    expected, all_kept = gradients(copy.deepcopy(model))
    ours = copy.deepcopy(model)
    for block in ours.model.layers:
        recompute.apply(block, mode)
    found, kept = gradients(ours)
    assert kept < 0.7 * all_kept
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b, within=1e-6)


# torch.compile itself looks at the .grad of inputs that are not leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_recomputed_block_is_still_compiled(model: torch.nn.Module, mode: str) -> None:
    """Wrapped in a functools.partial, torch.compile would capture nothing and say nothing."""
    torch._dynamo.reset()
    counters.clear()
    expected, _ = gradients(copy.deepcopy(model))
    ours = copy.deepcopy(model)
    for block in ours.model.layers:
        recompute.apply(block, mode)
    for block in ours.model.layers:  # type: ignore[union-attr]
        block.compile(backend="aot_eager")
    ids = torch.arange(32).reshape(2, 16)
    ours(input_ids=ids, use_cache=False).logits.square().mean().backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    for a, b in zip((p.grad for p in ours.parameters()), expected, strict=True):
        assert_near(a, b, within=1e-4)
    torch._dynamo.reset()
