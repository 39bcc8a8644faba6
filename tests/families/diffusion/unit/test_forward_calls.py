"""Each class of denoiser is given what its pipeline gives it: the same prediction as by hand; what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.dist.wrap import find_blocks
from fullshard.errors import DataError, RecipeError
from fullshard.families.diffusion.objectives.flow_matching import FlowMatching
from fullshard.families.diffusion.sampling.conditioning import guidance_of
from tests.families.diffusion.denoisers import CASES, CHANNELS, SIDE, by_hand, family, inputs, plain, real, stored
from tests.near import assert_near


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_prediction_is_that_of_diffusers_own_model(name: str) -> None:
    module = real(family(name))
    noisy, times, labels, text = inputs(module)
    found = module.denoise(noisy, times, labels, text)
    assert found.shape == noisy.shape
    assert float(found.abs().max()) > 0.01
    assert_near(found, by_hand(name, plain(module), noisy, times, labels, text))
    if text is not None:
        for key in text.keys() - {"mask"}:
            other = {**text, key: text[key] + 1}
            assert not torch.allclose(found, module.denoise(noisy, times, labels, other)), key
        none = {"states": torch.zeros(3, 1, module.text_width), "mask": torch.ones(3, 1, dtype=torch.bool)}
        if module.pooled_width is not None:
            none["pooled"] = torch.zeros(3, module.pooled_width)
        without = module.denoise(noisy, times, labels)
        assert torch.equal(without, module.denoise(noisy, times, labels, none))
        assert not torch.allclose(found, without)


@torch.no_grad()
def test_a_masked_token_means_nothing_to_pixart() -> None:
    module = real(family("pixart"))
    noisy, times, _, text = inputs(module)
    other = torch.where(text["mask"][..., None], text["states"], 7.0)
    found = (module.denoise(noisy, times, None, {**text, "states": states}) for states in (text["states"], other))
    assert_near(*found)


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_found_and_a_forward_pass_is_rehearsed(name: str) -> None:
    chosen = family(name)
    module = chosen.build(processor=None)
    chosen.rehearse(copy.deepcopy(module).to("meta"))
    plan = find_blocks(module, hints=chosen.blocks(module), rehearse=chosen.rehearse)
    assert len(plan.blocks) >= 2
    assert bool(plan.reached) == (name == "dit")
    expected = {"dit": (None, None), "unet": (None, None), "pixart": (24, None), "pixart-sized": (24, None)}
    widths = expected.get(name, (24, None if name == "unet_text" else 20))
    assert (module.text_width, module.pooled_width) == widths
    assert module.image_channels == CHANNELS


@pytest.mark.parametrize("name", CASES)
def test_an_exported_folder_is_read_by_diffusers_and_by_us(tmp_path: Path, name: str) -> None:
    import diffusers

    chosen = family(name)
    module = real(chosen)
    chosen.export(module, iter(module.named_parameters()), tmp_path, processor=None)
    theirs = diffusers.AutoModel.from_pretrained(str(tmp_path))
    own = module.state_dict()
    assert type(theirs).__name__ == module.class_name
    assert theirs.state_dict().keys() == own.keys()
    assert all(torch.equal(own[key], value) for key, value in theirs.state_dict().items())
    again = stored(tmp_path)
    loaded = again.build(processor=None)
    assert (loaded.num_classes, loaded.text_width) == (module.num_classes, module.text_width)
    weights = again.weights(loaded)
    assert all(torch.equal(weights.read(key, 0, len(value)), value) for key, value in own.items())


class Rows:
    """A large tensor as an export gives it: what it is, and rows when they are asked for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.shape, self.dtype = tensor.detach(), tensor.shape, tensor.dtype
        self.dim, self.numel = tensor.dim, tensor.numel

    def __getitem__(self, rows: Any) -> torch.Tensor:
        return self._tensor[rows]


@pytest.mark.parametrize(("name", "norm"), [("dit", "ada_norm_zero"), ("pixart", "ada_norm_single")])
def test_a_folder_of_the_former_class_is_read(tmp_path: Path, name: str, norm: str) -> None:
    """As the first DiT and PixArt models lie on the hub."""
    chosen = family(name)
    module = real(chosen)
    tensors = ((key, Rows(value)) for key, value in module.named_parameters())
    chosen.export(module, tensors, tmp_path, processor=None, dtype=torch.float16)
    file = tmp_path / "config.json"
    config = {**json.loads(file.read_text()), "double_self_attention": False}
    file.write_text(json.dumps({**config, "_class_name": "Transformer2DModel", "norm_type": norm}))
    again = stored(tmp_path)
    loaded = again.build(processor=None)
    assert (loaded.class_name, loaded.num_classes) == (module.class_name, module.num_classes)
    weights = again.weights(loaded)
    for key, value in module.named_parameters():
        assert torch.equal(weights.read(key, 0, len(value)), value.half()), key
    file.write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=r"double_self_attention is not a setting of .* was saved by 0\."):
        stored(tmp_path).build(processor=None)
    file.write_text(json.dumps({**config, "_class_name": "Transformer2DModel", "norm_type": "layer_norm"}))
    with pytest.raises(RecipeError, match=r"config\.json: _class_name = 'Transformer2DModel' is a class of diffusers"):
        stored(tmp_path).build(processor=None)


def test_initial_weights_pass_the_input_through() -> None:
    """Predictions of transformers begin at zero, as those of the papers, and no parameter is left without a value."""
    for name in ("sd3", "flux", "pixart"):
        chosen = family(name)
        module: Any = chosen.build(processor=None)
        with torch.no_grad():
            for parameter in module.to_empty(device="cpu").parameters():
                parameter.fill_(float("nan"))
            chosen.initialise(module, root=module)
            assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())
            if name != "flux":
                module.pos_embed.pos_embed.zero_()
            noisy, times, labels, text = inputs(module)
            assert not module.denoise(noisy, times, labels, text).any()


def test_a_dit_begins_as_the_identity_with_classes_far_apart() -> None:
    """Gates and the last layers are zero, all else is Xavier's; labels are from N(0, 1)."""
    chosen = family("dit", classes=999, overrides={**CASES["dit"]["overrides"], "num_attention_heads": 4})
    module: Any = chosen.build(processor=None)
    with torch.no_grad():
        for parameter in module.to_empty(device="cpu").parameters():
            parameter.fill_(float("nan"))
        torch.manual_seed(0)
        chosen.initialise(module, root=module)
    zero = {name for name, parameter in module.named_parameters() if not parameter.any()}
    gates = {name for name, _ in module.named_parameters() if ".norm1.linear." in name or name.startswith("proj_out_")}
    biases = {name for name, _ in module.named_parameters() if name.endswith("bias") and "pos_embed" not in name}
    assert zero == gates | biases
    tables = [part.weight.detach() for part in module.modules() if isinstance(part, torch.nn.Embedding)]
    assert [tuple(table.shape) for table in tables] == [(1000, 64)] * 2
    for table in tables:
        # 64,000 numbers: the mean of them is off by 0.004, and their deviation by 0.003, in one case of three.
        assert abs(float(table.mean())) < 0.02
        assert abs(float(table.std()) - 1) < 0.02
    linear = module.transformer_blocks[0].attn1.to_q.weight.detach()
    assert float(linear.abs().max()) <= (6 / (64 + 64)) ** 0.5


def test_guidance_has_a_default_unless_the_model_takes_its_own() -> None:
    """As FluxPipeline, whose true_cfg_scale is 1 unless it is asked for."""
    for name, expected in (("dit", 2.0), ("flux", 2.0), ("flux-guided", 1.0)):
        module = family(name).build(processor=None)
        settings: Any = {"usual": 2.0, "where": "--guidance"}
        assert guidance_of(module, FlowMatching(), None, **settings) == expected
        assert guidance_of(module, FlowMatching(), 3.0, **settings) == 3.0


def test_mistakes_have_clear_messages() -> None:
    module = real(family("sd3"))
    noisy, times, labels, text = inputs(module)
    with pytest.raises(DataError, match=r"text_states: SD3Trans.* takes vectors of 24, but the batch has vectors of 7"):
        module.denoise(noisy, times, None, {**text, "states": torch.zeros(3, 2, 7)})
    del text["pooled"]
    with pytest.raises(DataError, match=r"text_pooled: SD3Trans.* takes vectors of 20, but the batch has none"):
        module.denoise(noisy, times, None, text)
    with pytest.raises(DataError, match="DiTTransformer2DModel takes no texts"):
        real(family("dit")).denoise(noisy, times, None, text)
    flux = real(family("flux"))
    for shape in ((3, CHANNELS, SIDE, 7), (3, 1, SIDE, SIDE)):
        with pytest.raises(DataError, match="takes 4 channels and even sides; found"):
            flux.denoise(torch.zeros(shape), times)
    with pytest.raises(RecipeError, match=r"model\.classes = 3, but FluxTransformer2DModel takes texts, not labels"):
        family("flux", classes=3).build(processor=None)
    overrides = {**CASES["unet_text"]["overrides"], "addition_embed_type": "image"}
    with pytest.raises(
        RecipeError, match=r"addition_embed_type = 'image' needs inputs other than .* Supported: null, text"
    ):
        family("unet_text", overrides=overrides | {"encoder_hid_dim": 8, "cross_attention_dim": 8}).build(
            processor=None
        )
