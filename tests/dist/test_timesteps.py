"""Timesteps in half precision: the sinusoid is computed in fp32 and cast once, wherever a model computes it."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.denoiser import CHANNELS, plain, sinusoid
from tests.dist.sharded_model import half, spread
from tests.near import assert_near
from tests.ranks import RankPool
from tests.slow import only_first

DENOISERS = "tests.dist.denoiser.Denoisers"


def embedded(name: str, compute: torch.dtype, kind: str, by_name: bool) -> dict[str, Any]:
    """All timesteps through the model: what reaches the layers behind the sinusoid, and what leaves them."""
    module, plan, _ = spread({"kind": DENOISERS, "name": name}, compute)
    embedders = [part for key, part in module.named_modules() if key.endswith("t_embedder")]
    behind = embedders[0] if isinstance(embedders[0], nn.Sequential) else embedders[0].mlp
    seen: dict[str, Any] = {"timed": plan.wrap.timed}
    first = behind[0] if isinstance(behind, nn.Sequential) else behind
    first.register_forward_pre_hook(lambda _, args: seen.update(reached=args[0].detach()))
    embedders[0].register_forward_hook(lambda _, args, output: seen.update(left=output.detach()))
    t = timesteps(kind)
    argument = "timesteps" if name == "in_root" else "t"
    x = torch.zeros(1000, 1, CHANNELS)
    output = module(x, **{argument: t}) if by_name else module(x, t)
    output.float().square().sum().backward()
    seen["gradients"] = all(bool(p.grad.full_tensor().isfinite().all()) for p in module.parameters())
    return {**seen, "output": output.dtype}


def timesteps(kind: str) -> torch.Tensor:
    return torch.arange(1000) if kind == "integer" else torch.arange(1000) + (0.25 if kind == "between" else 0.0)


def distinct(tensor: torch.Tensor) -> int:
    return len(torch.unique(tensor, dim=0))


@half
@pytest.mark.parametrize("kind", only_first(["integer", "float", "between"]))
@pytest.mark.parametrize(
    ("name", "by_name"),
    [("embedder", False), ("embedder", True), ("in_root", False), ("in_root", True), ("in_blocks", False)],
)
def test_all_timesteps_stay_distinct(
    ranks: RankPool, name: str, by_name: bool, kind: str, compute: torch.dtype
) -> None:
    module: Any = plain(name)
    embedder = module.blocks[0].t_embedder if name == "in_blocks" else module.t_embedder
    t = timesteps(kind)
    with torch.no_grad():
        exact = embedder(sinusoid(t) if name == "in_root" else t)
    for seen in ranks.run(embedded, name, compute, kind, by_name, world=2):
        assert torch.equal(seen["reached"], sinusoid(t).to(compute)), "computed in fp32, cast once"
        assert (seen["left"].dtype, seen["output"]) == (compute, torch.float32)
        assert distinct(seen["left"]) == 1000
        apart = float((seen["left"].float() - exact).abs().max() / exact.abs().max())
        # Weights, inputs and the hidden layer are rounded once each.
        assert apart < 4 * torch.finfo(compute).eps, apart
        assert seen["gradients"]


def test_timesteps_cast_before_the_sinusoid_collide() -> None:
    """The reason for the rule."""
    t = torch.arange(1000).float()
    assert distinct(t.bfloat16()) == 507
    assert distinct(sinusoid(t.bfloat16())) == 507
    assert distinct(sinusoid(t)) == 1000
    between = torch.arange(4000) / 4
    assert distinct(between.half()) < distinct(between) == 4000


def gradients(name: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Of one sample for each rank, and what was warned of."""
    module, _, _ = spread({"kind": DENOISERS, "name": name}, torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        squared_error(module, slice(int(os.environ["RANK"]), int(os.environ["RANK"]) + 1)).backward()
    warned = [str(w.message) for w in caught if "FSDP" in str(w.message)]
    return warned, {key: p.grad.full_tensor() for key, p in module.named_parameters()}


def squared_error(module: Any, rows: slice) -> torch.Tensor:
    x = torch.randn(2, 6, CHANNELS, generator=torch.Generator().manual_seed(8))[rows]
    loss: torch.Tensor = (module(x, torch.tensor([12.5, 997.0])[rows]) - x).square().sum()
    return loss


@pytest.mark.parametrize("name", ["embedder", "in_root", "in_blocks"])
def test_separate_units_do_not_change_the_gradients(ranks: RankPool, name: str) -> None:
    """Also where what a unit gives is a view, and is added to in place: FSDP would lose its hooks there."""
    module = plain(name)
    squared_error(module, slice(None)).backward()
    expected = {key: p.grad for key, p in module.named_parameters()}
    for warned, found in ranks.run(gradients, name, world=2):
        assert warned == []
        assert found.keys() == expected.keys()
        for key, gradient in expected.items():
            assert gradient is not None
            assert_near(found[key], gradient, within=1e-4, what=key)
