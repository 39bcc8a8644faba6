"""Every class of denoiser, sharded: the step of a plain diffusers model, and timesteps that stay apart in
half precision."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.dist.mesh import choose_layout, make_mesh
from fullshard.dist.shard import ShardPlan, shard
from fullshard.dist.world import join
from fullshard.dist.wrap import find_blocks
from fullshard.families.diffusion.kernels import fused
from tests.families.diffusion.denoisers import CHANNELS, CLASSES, by_hand, family, inputs, plain, real, stored
from tests.ranks import RankPool
from tests.slow import only_first

SAMPLES, LR = 3, 1e-3  # odd, so that ranks have unequal shares
HALVES = (torch.bfloat16, torch.float16)
ALL = torch.arange(1000).float()  # whole numbers would never be cast


def spread(chosen: Any, compute: torch.dtype, *, recompute: str = "none", device: str = "cpu") -> Any:
    """The model as a run spreads it over its ranks, with the kernels of a device."""
    world = join(device="cpu", backend="gloo", timeout_s=60)
    module = chosen.build(processor=None)
    chosen.choose_kernels(module, device=device, compute=compute, packed=False)
    layout = choose_layout("full", world, state_bytes=0)
    wrap = find_blocks(module, rehearse=chosen.rehearse)
    plan = ShardPlan(wrap, layout, compute, activation_checkpointing=recompute)
    mesh, weights = make_mesh(layout, world), chosen.weights(module)
    shard(module, plan, mesh, family=chosen, weights=weights, device=world.device, seed=0)
    return module


def squared_error(found: torch.Tensor, noisy: torch.Tensor) -> torch.Tensor:
    """The sum over samples; the target is anything that differs between them."""
    return (found - noisy.flip(1)).square().flatten(1).mean(1).sum() / SAMPLES


def one_step(folder: Path) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """This rank's part of the loss, all gradients, and the parameters after a step of AdamW, which are exported too."""
    chosen, rank = stored(folder), int(os.environ["RANK"])
    module = spread(chosen, torch.float32, recompute="full")
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
    noisy, times, labels, text = inputs(module, SAMPLES)
    rows = slice(rank, None, int(os.environ["WORLD_SIZE"]))
    cut = None if text is None else {key: value[rows] for key, value in text.items()}
    found = module.denoise(noisy[rows], times[rows], None if labels is None else labels[rows], cut)
    loss = squared_error(found, noisy[rows])
    loss.backward()
    gradients = {name: p.grad.full_tensor() for name, p in module.named_parameters()}
    optimizer.step()
    after = {name: p.full_tensor().detach() for name, p in module.named_parameters()}
    if rank == 0:
        chosen.export(module, iter(after.items()), folder / "after", processor=None)
    return loss.item(), gradients, after


@pytest.mark.parametrize("name", only_first(CLASSES))
def test_a_step_is_that_of_diffusers_own_model(ranks: RankPool, tmp_path: Path, name: str) -> None:
    import diffusers

    chosen = family(name)
    module = real(chosen)
    chosen.export(module, iter(module.named_parameters()), tmp_path, processor=None)
    model, given = plain(module), inputs(module, SAMPLES)
    right = squared_error(by_hand(name, model, *given), given[0])
    right.backward()
    found = ranks.run(one_step, tmp_path, world=2)
    assert sum(loss for loss, _, _ in found) == pytest.approx(right.item(), rel=1e-6)
    _, gradients, after = found[0]
    for key, parameter in model.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=0, atol=1e-5 * scale + 1e-7, msg=key)
        assert scale == 0 or not torch.equal(after[key], parameter), key
    loaded = diffusers.AutoModel.from_pretrained(str(tmp_path / "after"))
    assert type(loaded) is type(model)
    assert all(torch.equal(parameter, after[key]) for key, parameter in loaded.named_parameters())


Seen = list[tuple[torch.Tensor, torch.Tensor]]


def reached(name: str) -> dict[torch.dtype, Seen]:
    """Of all timesteps: what the layers behind each sinusoid get, and what they give."""
    small = {"sample_size": 2} if name != "flux" else {}
    found = {}
    for compute in HALVES:
        chosen = family(name)
        module = spread(chosen.model_copy(update={"overrides": {**chosen.overrides, **small}}), compute)
        found[compute] = watched(module)
        with torch.no_grad():
            module.denoise(torch.zeros(1000, CHANNELS, 2, 2), ALL)
    return found


def watched(module: Any) -> Seen:
    seen: Seen = []
    for part in module.modules():
        if type(part).__name__.removeprefix("FSDP") == "TimestepEmbedding":
            part.linear_1.register_forward_pre_hook(lambda layer, args: layer.__dict__.update(given=args[0]))
            part.register_forward_hook(lambda part, args, output: seen.append((part.linear_1.given, output)))
    return seen


@pytest.mark.parametrize("name", only_first(CLASSES))
def test_all_timesteps_stay_distinct(ranks: RankPool, name: str) -> None:
    model = plain(real(family(name)))
    sinusoid = next(part for part in model.modules() if type(part).__name__ == "Timesteps")
    expected = sinusoid(ALL / 1000 * 1000 if name == "flux" else ALL)
    for rank in ranks.run(reached, name, world=2):
        for compute, seen in rank.items():
            assert seen
            for given, left in seen:
                assert torch.equal(given, expected.to(compute)), "computed in fp32, cast once"
                assert len(torch.unique(left, dim=0)) == 1000
                assert left.dtype == compute


def asked_for_kernels(compute: torch.dtype) -> set[tuple[str, torch.dtype]]:
    """Which parts of a sharded DiT asked whether they may use our kernels, and for what; none may, on a CPU."""
    chosen, asked = family("dit"), set()

    def answer(x: torch.Tensor) -> bool:
        asked.add((sys._getframe(1).f_code.co_name, x.dtype))
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused.custom, "runs", answer)
        module = spread(chosen, compute, device="cuda")
        asked.clear()
        noisy, times, labels, text = inputs(module, SAMPLES)
        module.denoise(noisy, times, labels, text)
    return asked


def test_modules_with_our_kernels_compute_in_half_precision_when_sharded(ranks: RankPool) -> None:
    for asked in ranks.run(asked_for_kernels, torch.bfloat16, world=2):
        assert asked == {(part, torch.bfloat16) for part in ("_embed", "_block", "_last_norm")}
