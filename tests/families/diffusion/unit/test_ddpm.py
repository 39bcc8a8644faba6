"""Denoising diffusion against diffusers' own scheduler, on a small real DiT in plain torch. What it shares with
rectified flow is tested beside that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats

from fullshard.config.part import decode
from fullshard.contracts.objective import Objective
from fullshard.errors import RecipeError
from fullshard.families.diffusion.keyed_noise import NOISE, TIME, normal, uniform
from fullshard.families.diffusion.objectives.ddpm import DDPM
from fullshard.families.diffusion.objectives.noise_schedule import alphas_cumprod, min_snr_weights, noised, velocity
from tests.families.diffusion.unit.test_flow_matching import SHAPE, Dit, assert_same, batch, gradients, run

THEIRS = {"linear": "linear", "cosine": "squaredcos_cap_v2"}
BETAS = pytest.mark.parametrize("betas", ["linear", "cosine"])


def scheduler(betas: str, **settings: Any) -> Any:
    from diffusers import DDPMScheduler

    return DDPMScheduler(beta_schedule=THEIRS[betas], **settings)


@BETAS
@pytest.mark.parametrize("num_timesteps", [1000, 50])
def test_noise_comes_in_as_diffusers_has_it(betas: Any, num_timesteps: int) -> None:
    theirs = scheduler(betas, num_train_timesteps=num_timesteps)
    ours = alphas_cumprod(betas, num_timesteps, torch.device("cpu"))
    assert torch.equal(ours, theirs.alphas_cumprod)
    images, noise = torch.randn(2, num_timesteps, 3, generator=torch.Generator().manual_seed(0))
    timesteps = torch.arange(num_timesteps)
    torch.testing.assert_close(noised(images, noise, ours), theirs.add_noise(images, noise, timesteps))
    torch.testing.assert_close(velocity(images, noise, ours), theirs.get_velocity(images, noise, timesteps))


@BETAS
@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("gamma", [None, 5.0])
def test_loss_and_gradients_are_those_of_a_plain_diffusers_loop(betas: Any, prediction: Any, gamma: Any) -> None:
    from diffusers.training_utils import compute_snr

    model, data, theirs = Dit(), batch(), scheduler(betas)
    images, noise = data["images"], normal(data["draws"], SHAPE, NOISE)
    timesteps = (uniform(data["draws"], TIME) * 1000).long()
    predicted = model.dit(theirs.add_noise(images, noise, timesteps), timesteps, class_labels=data["label"]).sample
    target = noise if prediction == "epsilon" else theirs.get_velocity(images, noise, timesteps)
    loss = (predicted - target).pow(2).mean(dim=(1, 2, 3))
    if gamma is not None:
        snr = compute_snr(theirs, timesteps)
        weights = torch.stack([snr, gamma * torch.ones_like(snr)], dim=1).min(dim=1)[0]
        loss = loss * (weights / snr if prediction == "epsilon" else weights / (snr + 1))
    loss.mean().backward()
    expected = loss.mean().item(), gradients(model)
    objective = DDPM(betas=betas, prediction=prediction, min_snr=gamma, label_drop=0)
    assert_same(run(objective, model, [data]), expected)
    assert torch.equal(model.given[1], timesteps)
    assert model.given[1].dtype == torch.int64


@BETAS
def test_no_timestep_counts_more_than_gamma(betas: Any) -> None:
    """As an error of the image, to which an error of epsilon is snr, and one of v is snr + 1 of it."""
    kept = alphas_cumprod(betas, 1000, torch.device("cpu"))
    snr = kept / (1 - kept)
    limited = snr.clamp(max=5.0)
    assert snr.max() > 5 > snr.min()
    torch.testing.assert_close(min_snr_weights(kept, 5.0, "epsilon") * snr, limited)
    torch.testing.assert_close(min_snr_weights(kept, 5.0, "v") * (snr + 1), limited)


def test_every_timestep_is_drawn_and_none_preferred() -> None:
    objective = DDPM()
    found = objective.timesteps(uniform(torch.arange(100_000), TIME))
    counts = torch.bincount(found, minlength=1000)
    assert len(counts) == 1000
    assert counts.min() > 0
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3
    assert objective.timesteps(torch.tensor([0.0, 0.9999, 1.0])).tolist() == [0, 999, 999]


@pytest.mark.parametrize("num_timesteps", [2, 10, 11, 1000])
def test_any_number_of_timesteps_can_be_proven(num_timesteps: int) -> None:
    lines = DDPM(num_timesteps=num_timesteps).check(Dit(), batch(1), packed=False, compute=torch.float32)
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prediction": "sample"}, "objective.prediction = 'sample': it must be one of epsilon, v"),
        ({"betas": "quadratic"}, "objective.betas = 'quadratic': it must be one of linear, cosine"),
        ({"min_snr": 0}, "objective.min_snr"),
        ({"num_timesteps": 1}, "objective.num_timesteps"),
        ({"loss": "l1_loss"}, "objective.loss is not a known key"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        decode(Objective, {"kind": "ddpm", **settings}, where="objective")
    assert message in str(caught.value)
