"""Data and denoiser have one shape, or the run is refused with a reason; a change of size is named, trained and
exported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullshard.errors import RecipeError
from fullshard.families.diffusion.denoiser.input_shape import require_shape
from fullshard.log.console import Console
from fullshard.recipes.read import read
from fullshard.setup.inputs import RunInputs
from fullshard.setup.run_inputs import prepare_inputs
from tests.families.diffusion.denoisers import (
    CASES,
    CHANNELS,
    CLASSES,
    SIDE,
    by_hand,
    family,
    inputs,
    plain,
    real,
    stored,
)
from tests.families.diffusion.parts import vae_folder


def refused(module: Any, shape: tuple[int, ...], **how: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        require_shape(module, shape, **{"what": "images", "scale": 1, **how})
    return str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_only_the_configured_shape_is_taken(name: str) -> None:
    module = family(name).build(processor=None)
    require_shape(module, (CHANNELS, SIDE, SIDE), what="images", scale=1)
    takes = f"but {module.class_name} takes 4 channels. From scratch, write model.overrides.in_channels: "
    assert f"{takes}{12 if 'flux' in name else 3}, or name the VAE" in refused(module, (3, SIDE, SIDE))
    if "flux" in name:  # any even sides: positions come with the image
        require_shape(module, (CHANNELS, 2 * SIDE, SIDE), what="images", scale=1)
        assert "needs sides that are multiples of 2" in refused(module, (CHANNELS, 7, SIDE))
        return
    said = refused(module, (CHANNELS, 4, 4))
    assert said.startswith("data.train gives images of 4 x 4 x 4 (channels x height x width), but ")
    assert f"{module.class_name} is configured for 8 x 8. To train, sample and export at 4 x 4, write " in said
    assert "write model.overrides.sample_size: 4; to keep the model's size, set data.encode.size: 8." in said
    assert "set data.encode.size: 64." in refused(module, (CHANNELS, 4, 4), scale=8)
    assert "use latents of that size." in refused(module, (CHANNELS, 4, 4), scale=None)


def test_shapes_that_a_class_cannot_take_have_a_reason() -> None:
    dit, unet, sd3 = (family(name).build(processor=None) for name in ("dit", "unet", "sd3"))
    assert "is configured for squares only" in refused(dit, (CHANNELS, 8, 4))
    assert "multiples of 2. Set data.encode.size to a multiple of 16." in refused(dit, (CHANNELS, 7, 7), scale=8)
    assert "multiples of 2. Save latents of such sizes." in refused(unet, (CHANNELS, 7, 7), scale=None)
    said = refused(sd3, (CHANNELS, 18, 18))
    assert "has positions for at most 8 patches of 2 a side (pos_embed_max_size = 8), which is 16 x 16" in said
    assert "from scratch set model.overrides.pos_embed_max_size to at least 9" in said
    wide = family("unet", overrides={"in_channels": CHANNELS, "sample_size": [8, 4]}).build(processor=None)
    require_shape(wide, (CHANNELS, 8, 4), what="images", scale=1)
    assert "write model.overrides.sample_size: [4, 8]" in refused(wide, (CHANNELS, 4, 8))
    unknown = family("unet", overrides={"in_channels": CHANNELS}).build(processor=None)
    assert "has no configured size. To train" in refused(unknown, (CHANNELS, 8, 8))


def prepared(folder: Path, **sections: Any) -> RunInputs:
    base: dict[str, Any] = {
        "name": "fit",
        "output": str(folder / "runs"),
        "model": {"kind": "diffusers", "architecture": "dit", "size": "tiny", "classes": 10},
        "objective": {"kind": "flow_matching"},
        "data": {"train": {"kind": "digits"}, "holdout": 0.1, "cache": str(folder / "cache"), "pack": False},
        "batch": {"per_device": 64},
        "duration": {"steps": 1},
        "topology": {"device": "cpu"},
        "evaluate": {"parts": ["loss"]},
    }
    chosen = {key: {**base.get(key, {}), **sections[key]} if key in sections else base[key] for key in base}
    return prepare_inputs(read(chosen).recipe, world_size=1, console=Console(silent=True))


def test_a_model_of_16_trains_on_digits_of_8_only_if_the_recipe_says_so(tmp_path: Path) -> None:
    sizes = {"in_channels": 1, "sample_size": 16}
    with pytest.raises(RecipeError, match=re.escape("is configured for 16 x 16. To train, sample and export at 8 x 8")):
        prepared(tmp_path, model={"overrides": sizes})
    module: Any = prepared(tmp_path, model={"overrides": {**sizes, "sample_size": 8}}).module
    assert module.config.sample_size == 8
    with pytest.raises(RecipeError, match=r"takes 4 channels. From scratch, write model.overrides.in_channels: 1"):
        prepared(tmp_path, model={"overrides": {"sample_size": 8}})


def test_latents_are_compared_wherever_they_are_made(tmp_path: Path) -> None:
    """Digits of 8 x 8 become latents of 2 x 4 x 4, before or in every step."""
    vae = str(vae_folder(tmp_path / "vae"))
    before = {"data": {"encode": {"kind": "image", "vae": vae}}}
    live = {"objective": {"kind": "ddpm", "vae": {"kind": "autoencoder", "path": vae}}}
    for sections, what in ((before, "latents by data.encode.vae of 2 x 4 x 4"), (live, "latents of 2 x 4 x 4")):
        with pytest.raises(RecipeError, match=what) as caught:
            prepared(tmp_path, model={"overrides": {"in_channels": 2, "sample_size": 8}}, **sections)
        assert "write model.overrides.sample_size: 4; to keep the model's size, set data.encode.size: 16" in str(caught)
        prepared(tmp_path, model={"overrides": {"in_channels": 2, "sample_size": 4}}, **sections)
    with pytest.raises(RecipeError, match=r"already gives latents \(data.encode.vae\). Leave one of the two out"):
        prepared(tmp_path, model={"overrides": {"in_channels": 2, "sample_size": 4}}, **before, **live)
    never = {"encode": {"kind": "image", "vae": vae, "size": 8}, "cache": str(tmp_path / "never")}
    with pytest.raises(RecipeError, match="latents by data.encode.vae of 2 x 4 x 4 .* set data.encode.size: 16"):
        prepared(tmp_path, model={"overrides": {"in_channels": 2, "sample_size": 8}}, data=never)
    assert not (tmp_path / "never").exists(), "before anything is encoded"
    with pytest.raises(
        RecipeError, match="data.encode.size = 7: an image is 7 x 7 pixels, but the VAE needs multiples of 2"
    ):
        prepared(tmp_path, data={**never, "encode": {**never["encode"], "size": 7}})  # type: ignore[dict-item]
    np.save(tmp_path / "latent.npy", np.zeros((2, 4, 4), dtype=np.float32))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"path": str(tmp_path / "latent.npy"), "label": 0}) + "\n")
    stored_latents = {"train": str(tmp_path / "rows.jsonl"), "holdout": 0}
    with pytest.raises(RecipeError, match="gives latents of 2 x 4 x 4 .* use latents of that size"):
        prepared(tmp_path, model={"overrides": {"in_channels": 2, "sample_size": 8}}, data=stored_latents)


def test_a_model_that_is_conditioned_on_texts_needs_some(tmp_path: Path) -> None:
    sizes = {"in_channels": 1, "sample_size": 8}
    with pytest.raises(
        RecipeError, match=r"PixArtTransformer2DModel is conditioned on texts \(states of width 32\), but the"
    ):
        prepared(tmp_path, model={"architecture": "pixart", "classes": None, "overrides": sizes})


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "flux"])
def test_a_stored_model_at_another_size_is_what_its_export_is(tmp_path: Path, name: str) -> None:
    """Trained at 4 x 4 by name; diffusers reads the export and predicts the same there."""
    import diffusers

    first = real(family(name))
    family(name).export(first, iter(first.named_parameters()), tmp_path / "before", processor=None)
    chosen = stored(tmp_path / "before", overrides={"sample_size": 4})
    module = chosen.build(processor=None)
    weights = chosen.weights(module)
    values = {key: weights.read(key, 0, len(value)) for key, value in module.state_dict().items()}
    module.load_state_dict(values, assign=True)
    require_shape(module, (CHANNELS, 4, 4), what="images", scale=1)
    chosen.export(module, iter(module.named_parameters()), tmp_path / "after", processor=None)
    assert json.loads((tmp_path / "after" / "config.json").read_text())["sample_size"] == 4
    theirs = diffusers.AutoModel.from_pretrained(str(tmp_path / "after")).eval()
    noisy, times, labels, text = inputs(module)
    noisy = noisy[..., :4, :4].contiguous()
    with torch.no_grad():
        found = module.eval().denoise(noisy, times, labels, text)
        torch.testing.assert_close(found, by_hand(name, theirs, noisy, times, labels, text), rtol=0, atol=1e-6)
        assert not torch.allclose(found, torch.zeros_like(found))


def test_pixart_keeps_its_layers_for_the_size_of_the_picture(tmp_path: Path) -> None:
    """Stored at 128, where the class has them without saying so."""
    wide = {"in_channels": CHANNELS, "sample_size": 128, "caption_channels": 24, "num_attention_heads": 3}
    module = real(family("pixart", overrides=wide))
    family("pixart", overrides=wide).export(module, iter(module.named_parameters()), tmp_path, processor=None)
    assert "use_additional_conditions" not in (tmp_path / "config.json").read_text() or module.use_additional_conditions
    again = stored(tmp_path, overrides={"sample_size": 64})
    smaller = again.build(processor=None)
    assert smaller.use_additional_conditions
    assert again.weights(smaller).names() == set(module.state_dict())
    assert plain(smaller_values(smaller, module)).use_additional_conditions


def smaller_values(smaller: Any, module: Any) -> Any:
    smaller.load_state_dict(module.state_dict(), assign=True)
    return smaller
