"""A small fp32 model on a CPU is whole for the passes of a step: gradients and weights as by FSDP's own way."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.dist.gradients import one_by_one
from fullshard.fast import whole
from fullshard.optim.adamw import AdamW
from tests.dist.sharded_model import spread, tokens
from tests.dist.sharded_model import whole as values
from tests.ranks import RankPool

QWEN = {"architecture": "qwen3", "size": "tiny", "overrides": {"vocab_size": 99, "hidden_size": 36}}
MODELS = {
    "odd shapes": QWEN,
    "tied": QWEN | {"overrides": QWEN["overrides"] | {"tie_word_embeddings": True}},
    "lora": {"architecture": "qwen3", "size": "tiny", "lora": True},
}


def opened(settings: dict[str, Any], *, strategy: str, as_whole: bool) -> tuple[Any, str]:
    module, plan, _ = spread(settings, torch.float32, strategy=strategy)
    mesh = mesh_of(module)
    if as_whole:
        whole.prepare(module, plan, mesh, torch.device("cpu"))
    return module, whole.described(module)


def mesh_of(module: nn.Module) -> DeviceMesh:
    first = next(module.parameters())
    assert isinstance(first, DTensor)
    return first.device_mesh


def loss_of(module: Any, turn: int) -> torch.Tensor:
    found: torch.Tensor = module(input_ids=tokens(64).roll(turn)).logits.square().mean()
    return found


def trained(settings: dict[str, Any], *, strategy: str, as_whole: bool) -> dict[str, Any]:
    """Three steps of two micro-batches, an evaluation between them."""
    module, said = opened(settings, strategy=strategy, as_whole=as_whole)
    optimizer = AdamW(lr=1e-2).open(module.named_parameters())
    found: dict[str, Any] = {"said": said, "losses": [], "grads": [], "plain": []}
    for step in range(3):
        with whole.within_step(module):
            with torch.no_grad():  # as objectives do that need all representations first
                loss_of(module, 7)
            found["plain"].append(not any(isinstance(p, DTensor) for p in module.parameters()))
            for turn in one_by_one(module, [2 * step, 2 * step + 1]):
                loss = loss_of(module, turn)
                loss.backward()
        found["losses"].append(loss.item())
        trainable = [p for p in module.parameters() if p.requires_grad]
        assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in trainable)
        found["grads"].append([p.grad.full_tensor().clone() for p in trainable])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found["losses"].append(loss_of(module, 0).item())
    return found | {"weights": values(module)}


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_changes_no_bit(ranks: RankPool, name: str) -> None:
    [expected] = ranks.run(trained, MODELS[name], world=1, strategy="full", as_whole=False)
    [found] = ranks.run(trained, MODELS[name], world=1, strategy="full", as_whole=True)
    assert found["said"] == "; whole within a step"
    assert all(found["plain"])
    assert not any(expected["plain"])
    assert found["losses"] == expected["losses"]
    assert len(set(found["losses"])) == 6, "the steps must change something"
    for ours, theirs in zip(found["grads"], expected["grads"], strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert all(torch.equal(found["weights"][key], value) for key, value in expected["weights"].items())


@pytest.mark.parametrize("name", MODELS)
def test_several_ranks_agree_with_fsdp(ranks: RankPool, name: str) -> None:
    several = 2 if name == "lora" else 3  # three ranks do not divide the rows
    expected = ranks.run(trained, MODELS[name], world=several, strategy="grad_op", as_whole=False)[0]
    for found in ranks.run(trained, MODELS[name], world=several, strategy="grad_op", as_whole=True):
        assert found["said"] == "; gathered and reduced once in a step"
        for ours, theirs in zip(found["grads"][0], expected["grads"][0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)
        for key, value in expected["weights"].items():
            torch.testing.assert_close(found["weights"][key], value, rtol=1e-3, atol=1e-4)


def left_alone(**changes: Any) -> tuple[str, bool]:
    import dataclasses

    module, plan, _ = spread(QWEN, torch.float32, strategy="grad_op")
    whole.prepare(module, dataclasses.replace(plan, **changes), mesh_of(module), torch.device("cpu"))
    return whole.described(module), hasattr(module, whole.WHOLE)


def test_other_plans_are_left_to_fsdp(ranks: RankPool) -> None:
    for changes in ({"compile": True}, {"cpu_offload": True}, {"compute": torch.bfloat16}):
        assert ranks.run(left_alone, world=1, **changes) == [("", False)]


def test_auto_leaves_small_models_to_this_way(ranks: RankPool) -> None:
    expected = ranks.run(trained, QWEN, world=2, strategy="full", as_whole=False)[0]
    for found in ranks.run(trained, QWEN, world=2, strategy="auto", as_whole=True):
        assert found["said"] == "; gathered and reduced once in a step"
        assert all(found["plain"])
        for key, value in expected["weights"].items():
            torch.testing.assert_close(found["weights"][key], value, rtol=1e-3, atol=1e-4)


def test_full_sharding_of_several_ranks_is_left_to_fsdp(ranks: RankPool) -> None:
    for found in ranks.run(trained, QWEN, world=2, strategy="full", as_whole=True):
        assert found["said"] == ""
        assert not any(found["plain"])


def uneven() -> tuple[list[str], list[str]]:
    """Gradients after a step in which only rank 0 uses the first layer, and nobody the second."""
    import os

    module, _ = opened(QWEN, strategy="grad_op", as_whole=True)
    with whole.within_step(module):
        used = module.model.layers[0] if os.environ["RANK"] == "0" else module.lm_head
        sum(p.square().sum() for p in used.parameters()).backward()
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    moving = [name for name, grad in found.items() if bool(grad.full_tensor().any())]
    return sorted(found), sorted(moving)


def test_a_parameter_that_some_rank_uses_has_a_gradient_on_all(ranks: RankPool) -> None:
    first, second = ranks.run(uneven, world=2)
    assert first == second
    assert first[0] == first[1], "those without a gradient on any rank get none"
    assert any(name.startswith("model.layers.0.") for name in first[0])
    assert "lm_head.weight" in first[0]
    assert not any(name.startswith("model.layers.1.") for name in first[0])


def broken_off() -> tuple[bool, bool, float]:
    module, _ = opened(QWEN, strategy="full", as_whole=True)
    before = loss_of(module, 0).item()
    with contextlib.suppress(ZeroDivisionError), whole.within_step(module):
        loss_of(module, 0).backward()
        raise ZeroDivisionError
    sharded = all(isinstance(p, DTensor) for p in module.parameters())
    without = all(p.grad is None for p in module.parameters())
    return sharded, without, abs(loss_of(module, 0).item() - before)


def test_after_an_error_the_model_is_sharded_again(ranks: RankPool) -> None:
    assert ranks.run(broken_off, world=1) == [(True, True, 0.0)]


def cast() -> str:
    module, _ = opened(QWEN, strategy="full", as_whole=True)
    with whole.within_step(module):
        rows = module.get_input_embeddings()(tokens(16)).double()
        return str(module(inputs_embeds=rows).logits.dtype)


def test_inputs_are_cast_as_fsdp_casts_them(ranks: RankPool) -> None:
    assert ranks.run(cast, world=1) == ["torch.float32"]
