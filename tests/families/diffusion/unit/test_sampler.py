"""The way from noise to images: exact where the model is, and step by step that of diffusers' own schedulers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fullshard.config.part import decode
from fullshard.contracts.objective import Objective
from fullshard.data.order import FIXED, draws
from fullshard.families.diffusion.denoiser.bind import bind
from fullshard.families.diffusion.keyed_noise import NOISE, normal
from fullshard.families.diffusion.objectives.noise_schedule import alphas_cumprod
from fullshard.families.diffusion.sampling.sampler import sample
from tests.near import assert_near

SHAPE = (1, 8, 8)


def objective(**settings: Any) -> Any:
    return decode(Objective, settings, where="objective")


def made(chosen: Any, model: Any, labels: torch.Tensor | None, numbers: torch.Tensor, **settings: Any) -> torch.Tensor:
    defaults: dict[str, Any] = {"steps": 8, "guidance": 1.0, "method": "euler", "seed": 0, "shape": SHAPE}
    return sample(chosen, model, labels, numbers, **defaults | settings)


class Knowing:
    """Knows the one image that there is, and predicts what a perfect model would."""

    null_label = 10

    def __init__(self, chosen: Any) -> None:
        self.chosen, self.image = chosen, torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))

    def denoise(self, noisy: torch.Tensor, timesteps: torch.Tensor, labels: Any) -> torch.Tensor:
        if self.chosen.kind() == "flow_matching":
            return (noisy - self.image) / (timesteps / 1000)[:, None, None, None]
        kept = alphas_cumprod(self.chosen.betas, 1000, torch.device("cpu"))[timesteps][:, None, None, None]
        noise = (noisy - kept.sqrt() * self.image) / (1 - kept).sqrt()
        return noise if self.chosen.prediction == "epsilon" else kept.sqrt() * noise - (1 - kept).sqrt() * self.image


WAYS = [
    {"kind": "flow_matching"},
    {"kind": "ddpm"},
    {"kind": "ddpm", "prediction": "v", "betas": "cosine"},
]


@pytest.mark.parametrize("method", ["euler", "heun"])
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_model_that_knows_the_image_is_led_to_it(way: dict[str, Any], steps: int, method: str) -> None:
    chosen = objective(**way)
    model = Knowing(chosen)
    found = made(chosen, model, None, torch.arange(3), steps=steps, method=method)
    # Cosine betas leave so little of the image at the last timestep, 5e-5, that fp32 has few digits for it.
    atol = 1e-2 if way.get("betas") == "cosine" else 1e-4
    torch.testing.assert_close(found, model.image.expand(3, -1, -1, -1), rtol=0, atol=atol)


@pytest.fixture(scope="module")
def model() -> Any:
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    shape = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "num_layers": 1}
    found = DiTTransformer2DModel(**shape, num_attention_heads=2, attention_head_dim=8, num_embeds_ada_norm=10).eval()
    bind(found, classes=10)
    return found


def test_an_image_follows_from_seed_and_number_alone(model: Any) -> None:
    chosen, labels = objective(kind="flow_matching"), torch.tensor([1, 2, 3])
    three = made(chosen, model, labels, torch.tensor([4, 5, 6]))
    one = made(chosen, model, labels[1:2], torch.tensor([5]))
    assert_near(three[1:2], one)
    assert not torch.allclose(one, made(chosen, model, labels[1:2], torch.tensor([5]), seed=1))
    assert not torch.allclose(one, made(chosen, model, labels[2:], torch.tensor([5])))


def test_guidance_counts_what_the_label_changes(model: Any) -> None:
    chosen, label, number = objective(kind="flow_matching"), torch.tensor([3]), torch.tensor([0])
    one_step = {"steps": 1}
    plain, without = (made(chosen, model, each, number, **one_step) for each in (label, torch.tensor([10])))
    assert not torch.allclose(plain, without)
    guided = made(chosen, model, label, number, guidance=3.0, **one_step)
    assert_near(guided, without + 3 * (plain - without))
    assert_near(made(chosen, model, label, number, guidance=0.0, **one_step), without)


@torch.no_grad()
def test_euler_steps_are_those_of_diffusers(model: Any) -> None:
    from diffusers import DDIMScheduler

    chosen, labels, numbers = objective(kind="ddpm"), torch.tensor([7]), torch.tensor([0])
    found = made(chosen, model, labels, numbers, steps=10)
    betas = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}
    scheduler = DDIMScheduler(1000, **betas, clip_sample=False, timestep_spacing="trailing")
    scheduler.set_timesteps(10)
    assert scheduler.timesteps.tolist() == chosen.levels(10)[:-1]
    state = normal(torch.from_numpy(draws(np.array([0]), seed=0, stream=FIXED)), SHAPE, NOISE)
    for timestep in scheduler.timesteps:
        noise = model(state, timestep[None], class_labels=labels).sample
        state = scheduler.step(noise, timestep, state, eta=0.0).prev_sample
    assert_near(found, state, within=1e-4)


class Listener:
    """Predicts the mean of the tokens that count."""

    null_label = None

    def denoise(self, noisy: torch.Tensor, timesteps: torch.Tensor, labels: Any, text: Any) -> torch.Tensor:
        counted = (text["states"] * text["mask"][..., None]).sum((1, 2)) / text["mask"].sum(1)
        return (counted + text["pooled"].sum(1))[:, None, None, None].expand_as(noisy) + 0.25


@pytest.mark.parametrize("method", ["euler", "heun"])
def test_guidance_counts_what_the_text_changes(method: str) -> None:
    generator = torch.Generator().manual_seed(0)
    states, pooled = torch.randn(2, 4, 3, generator=generator), torch.randn(2, 5, generator=generator)
    text = {"states": states, "mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool(), "pooled": pooled}
    none = {"states": torch.full((1, 4, 3), 0.5), "mask": torch.ones(1, 4).bool(), "pooled": torch.ones(1, 5)}
    chosen, model = objective(kind="flow_matching"), Listener()
    start = normal(torch.from_numpy(draws(np.arange(2), seed=0, stream=FIXED)), SHAPE, NOISE)
    told = torch.stack([states[0, :2].sum() / 2, states[1].sum() / 4]) + pooled.sum(1)
    for guidance in (0.0, 1.0, 3.0):
        found = made(chosen, model, None, torch.arange(2), text=text, empty=none, guidance=guidance, method=method)
        # What means no text: four tokens of 0.5 in three dimensions, and five ones.
        expected = start - (6.5 + guidance * (told - 6.5) + 0.25)[:, None, None, None]
        assert_near(found, expected, within=1e-4)
