"""What a denoiser is given of a batch with texts or with a VAE: dropped texts, fillers, and data of another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.config.part import decode
from fullshard.contracts.objective import Objective
from fullshard.errors import RecipeError
from fullshard.families.diffusion.denoiser.batch_inputs import inputs_of, texts_of
from fullshard.families.diffusion.denoiser.checks import check_denoiser, require_denoiser
from fullshard.families.diffusion.keyed_noise import LABEL_DROP, uniform
from fullshard.families.diffusion.objectives.ddpm import DDPM
from fullshard.families.diffusion.objectives.flow_matching import FlowMatching
from tests.families.diffusion.parts import vae_folder
from tests.near import assert_near

WIDTH, POOLED, TOKENS = 6, 5, 4
TIMES = torch.arange(11)


class Reader(nn.Module):
    """Denoises by a text, and remembers what it was given."""

    num_classes: int | None = None
    null_label: int | None = None
    text_width: int | None = WIDTH
    pooled_width: int | None = POOLED
    image_channels = 1

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(WIDTH, 1)
        self.told = nn.Linear(1, 1)
        self.given: list[Any] = []

    def denoise(self, noisy: torch.Tensor, timesteps: torch.Tensor, labels: Any, text: Any = None) -> torch.Tensor:
        self.given = [noisy, timesteps, labels, text]
        scale = self.told(timesteps[:, None].float())
        if text is not None:
            states = torch.where(text["mask"][..., None], text["states"], 0.0)
            scale = scale + self.read(states).sum(1)
        return noisy * scale[:, :, None, None]


def batch(samples: int = 6, *, fillers: int = 0, channels: int = 1, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.cat([torch.arange(samples), torch.full((fillers,), -1)])
    rows = len(ids)
    found = {
        "images": torch.rand(rows, channels, 8, 8, generator=generator) * 2 - 1,
        "label": torch.zeros(rows, dtype=torch.int64),
        "draws": ids * 104729 + 5,
        "sample_ids": ids,
        "text_states": torch.randn(rows, TOKENS, WIDTH, generator=generator),
        "text_mask": torch.arange(TOKENS) < torch.arange(1, rows + 1)[:, None] % TOKENS + 1,
        "text_pooled": torch.randn(rows, POOLED, generator=generator),
        "empty_states": torch.randn(1, TOKENS, WIDTH, generator=generator),
        "empty_mask": torch.tensor([[True, True, False, False]]),
        "empty_pooled": torch.randn(1, POOLED, generator=generator),
    }
    return {key: value for key, value in {**found, **changes}.items() if value is not None}


@pytest.mark.parametrize("objective", [FlowMatching(label_drop=0.4), DDPM(label_drop=0.4)])
def test_dropped_texts_are_the_empty_one(objective: Any) -> None:
    model, data = Reader(), batch(400, fillers=2)
    objective.loss(model, data, {})
    text = model.given[3]
    dropped = (uniform(data["draws"], LABEL_DROP) < 0.4) | (data["sample_ids"] < 0)
    assert 0.3 < dropped.float().mean() < 0.5
    for name in ("states", "mask", "pooled"):
        assert torch.equal(text[name][dropped], data[f"empty_{name}"].expand_as(text[name][dropped]))
        assert torch.equal(text[name][~dropped], data[f"text_{name}"][~dropped])


def test_without_an_empty_text_it_is_zeros_that_all_count() -> None:
    bare = {key: value for key, value in batch().items() if not key.startswith("empty_")}
    text, none = texts_of(Reader(), bare)
    assert {name: part.shape[1:] for name, part in text.items()} == {n: part.shape[1:] for n, part in none.items()}
    assert not none["states"].any()
    assert not none["pooled"].any()
    assert bool(none["mask"].all())


def test_texts_are_dropped_with_the_labels_and_by_default() -> None:
    model, data = Reader(), batch(5000)
    model.num_classes = model.null_label = 7
    seen = inputs_of(model, data, label_drop=None)
    assert seen.labels is not None
    assert seen.text is not None
    assert float((seen.labels == 7).float().mean()) == pytest.approx(0.1, abs=0.02)
    assert torch.equal(seen.labels == 7, (seen.text["states"] == data["empty_states"]).flatten(1).all(1))
    kept = inputs_of(model, data, label_drop=0.0)
    assert kept.text is not None
    assert torch.equal(kept.text["states"], data["text_states"])


def test_a_text_is_enough_to_drop() -> None:
    require_denoiser(Reader(), kind="ddpm", label_drop=0.2)
    model = Reader()
    model.pooled_width = None
    seen = inputs_of(model, batch(text_pooled=None), label_drop=0.0)
    assert seen.text is not None
    assert sorted(seen.text) == ["mask", "states"]


def test_the_loss_of_a_sample_does_not_depend_on_others() -> None:
    model, objective, data = Reader(), FlowMatching(label_drop=0.3), batch(6, fillers=1)
    whole = objective.loss(model, data, {}).loss_sum
    parts = [{k: v if k.startswith("empty_") else v[i : i + 1] for k, v in data.items()} for i in range(7)]
    torch.testing.assert_close(whole, sum(objective.loss(model, part, {}).loss_sum for part in parts))


@pytest.mark.parametrize(
    ("takes", "changes", "says"),
    [
        ((None, None), {}, "data.encode.text gives texts, but Reader takes no texts"),
        ((WIDTH, None), {"text_states": None}, "is conditioned on texts (states of width 6), but the data has none"),
        ((WIDTH + 1, None), {}, "gives states of width 6, but Reader takes 7"),
        (
            (WIDTH, POOLED),
            {"text_pooled": None},
            "takes a pooled vector of width 5, but data.encode.text gives none",
        ),
        ((WIDTH, POOLED + 1), {}, "takes a pooled vector of width 6, but data.encode.text gives 5"),
        (
            (WIDTH, POOLED),
            {"images": torch.zeros(6, 3, 8, 8)},
            "of 3 x 8 x 8 (channels x height x width), but Reader takes 1 channel.",
        ),
    ],
)
def test_data_of_another_model_is_refused(takes: Any, changes: dict[str, Any], says: str) -> None:
    model = Reader()
    model.text_width, model.pooled_width = takes
    with pytest.raises(RecipeError) as caught:
        FlowMatching().check(model, batch(**changes), packed=False, compute=torch.float32)
    assert says in str(caught.value)


def test_a_model_that_reads_texts_is_proven_with_one() -> None:
    model = Reader()
    lines = check_denoiser(model, batch(), TIMES, compute=torch.float32)
    assert lines == ["the model can tell neighbouring timesteps apart (float32)"]
    assert model.given[3]["states"].shape == (11, TOKENS, WIDTH)


# --- a VAE in every step


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vae_folder(tmp_path_factory.mktemp("vae"))


def objective_of(vae: Path, **settings: Any) -> Any:
    found = {"kind": "flow_matching", "vae": {"kind": "autoencoder", "path": str(vae)}, **settings}
    return decode(Objective, found, where="objective")


class Blank(Reader):
    text_width = None
    pooled_width = None
    image_channels = 2


@pytest.mark.parametrize("kind", ["flow_matching", "ddpm"])
def test_images_become_latents_without_a_gradient(vae: Path, kind: str) -> None:
    from diffusers import AutoencoderKL

    from fullshard.families.diffusion.vae.autoencoder_kl import load

    objective, model = objective_of(vae, kind=kind), Blank()
    assert list(objective.frozen()) == ["vae"]
    data = batch(text_states=None)
    helper = load(vae, device=torch.device("cpu"), where="x")
    found = objective.loss(model, data, {"vae": helper}).loss_sum
    stored: Any = AutoencoderKL.from_pretrained(vae)
    with torch.no_grad():
        latents = (stored.encode(data["images"]).latent_dist.mode() - 0.125) * 2.5
    plain = decode(Objective, {"kind": kind}, where="objective").loss(model, {**data, "images": latents}, {}).loss_sum
    assert_near(found, plain)
    assert not any(parameter.requires_grad for parameter in helper.parameters())


def test_images_that_the_vae_does_not_take_are_found_before_the_first_step(vae: Path) -> None:
    objective, model = objective_of(vae), Blank()

    def checked(images: torch.Tensor) -> list[str]:
        data = batch(text_states=None, images=images)
        return objective.check(model, data, packed=False, compute=torch.float32)  # type: ignore[no-any-return]

    assert checked(torch.zeros(2, 1, 8, 8)) == ["the model can tell neighbouring timesteps apart (float32)"]
    assert model.given[0].shape == (11, 2, 4, 4)
    with pytest.raises(RecipeError, match=r"an image of data.train is 8 x 7 pixels, but the VAE needs multiples of 2"):
        checked(torch.zeros(2, 1, 8, 7))
    with pytest.raises(RecipeError, match=r"has 3 channels, but the VAE takes 1. Set data.encode.channels = 1"):
        checked(torch.zeros(2, 3, 8, 8))
    with pytest.raises(RecipeError, match=r"values from -1 to 1, but data.train has values up to 3. Leave"):
        checked(torch.full((2, 1, 8, 8), 3.0))


def test_a_frozen_model_of_another_kind_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"objective.vae.kind = hf is not a VAE. Use objective.vae"):
        decode(Objective, {"kind": "ddpm", "vae": {"path": "x"}}, where="objective")
