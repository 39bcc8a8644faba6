"""Denoisers of diffusers: shapes, labels, folders and pipelines; what is refused, and in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.config.part import decode
from fullshard.contracts.model import Family
from fullshard.errors import CheckpointError, RecipeError
from tests.near import assert_near

SHAPE = {"sample_size": 8, "in_channels": 1, "out_channels": 1}


def family(**settings: Any) -> Any:
    return decode(Family, {"kind": "diffusers", **settings}, where="model")


def tiny(architecture: str = "dit", **settings: Any) -> Any:
    return family(architecture=architecture, size="tiny", overrides=SHAPE, **settings)


def real(chosen: Any) -> nn.Module:
    """The module with fresh values, all on the CPU."""
    module: nn.Module = chosen.build(processor=None)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device="cpu")
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
    torch.manual_seed(0)
    chosen.initialise(module, root=module)
    return module


@pytest.mark.parametrize(
    ("size", "layers", "width", "patch"),
    [("S/2", 12, 384, 2), ("B/4", 12, 768, 4), ("L/8", 24, 1024, 8), ("XL/2", 28, 1152, 2)],
)
def test_named_sizes_of_dit(size: str, layers: int, width: int, patch: int) -> None:
    module: Any = family(architecture="dit", size=size, classes=1000).build(processor=None)
    assert (len(module.transformer_blocks), module.inner_dim, module.patch_size) == (layers, width, patch)
    assert all(parameter.is_meta for parameter in module.parameters())


@pytest.mark.parametrize("architecture", ["dit", "unet"])
def test_labels_reach_the_model_and_no_class_is_a_separate_label(architecture: str) -> None:
    module: Any = real(tiny(architecture, classes=10))
    assert (module.num_classes, module.null_label) == (10, 10)
    with torch.no_grad():
        for parameter in module.parameters():  # the first values of a DiT give zero whatever goes in
            parameter.add_(torch.randn_like(parameter) * 0.1)
        noisy, times = torch.randn(1, 1, 8, 8).expand(11, -1, -1, -1), torch.full((11,), 500)
        found = module.denoise(noisy, times, torch.arange(11))
        assert found.shape == noisy.shape
        assert len(torch.unique(found.flatten(1), dim=0)) == 11
        assert torch.equal(
            module.denoise(noisy[:1], times[:1]), module.denoise(noisy[:1], times[:1], torch.tensor([10]))
        )
        # Nothing is dropped by the model itself, also in training.
        module.train()
        assert all(torch.equal(module.denoise(noisy, times, torch.arange(11)), found) for _ in range(3))


def test_without_classes_there_is_no_label() -> None:
    for architecture in ("dit", "unet"):
        module: Any = real(tiny(architecture))
        assert (module.num_classes, module.null_label) == (None, None)
        assert module.denoise(torch.randn(2, 1, 8, 8), torch.tensor([0, 999])).shape == (2, 1, 8, 8)


def test_a_fresh_dit_is_the_identity() -> None:
    module: Any = real(tiny(classes=3))
    assert not module.denoise(torch.randn(2, 1, 8, 8), torch.tensor([1, 2]), torch.tensor([0, 1])).any()
    assert any(parameter.any() for parameter in module.transformer_blocks.parameters())


def test_an_exported_folder_is_read_by_diffusers_and_by_us(tmp_path: Path) -> None:
    import diffusers

    chosen = tiny(classes=10)
    module: Any = real(chosen)
    with torch.no_grad():
        module.proj_out_2.weight.normal_()
    chosen.export(module, iter(module.named_parameters()), tmp_path / "model", processor=None)
    theirs = diffusers.DiTTransformer2DModel.from_pretrained(tmp_path / "model")
    assert type(diffusers.AutoModel.from_pretrained(str(tmp_path / "model"))) is diffusers.DiTTransformer2DModel
    noisy, times, labels = torch.randn(2, 1, 8, 8), torch.tensor([3, 700]), torch.tensor([1, 10])
    with torch.no_grad():
        right = theirs.eval()(noisy, times, class_labels=labels).sample
        assert torch.equal(module.denoise(noisy, times, labels), right)
    # A pipeline has it in a folder of its own.
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "model").rename(tmp_path / "pipeline" / "transformer")
    again = family(path=str(tmp_path / "pipeline"))
    loaded: Any = again.build(processor=None)
    assert loaded.num_classes == 10
    weights = again.weights(loaded)
    own = module.state_dict()
    assert weights.names() == own.keys()
    assert all(torch.equal(weights.read(name, 0, len(tensor)), tensor) for name, tensor in own.items())


@torch.no_grad()
def test_a_pipeline_draws_with_the_exported_model(tmp_path: Path) -> None:
    """Step by step what the module itself predicts."""
    import diffusers

    chosen = family(architecture="dit", size="tiny", overrides={"sample_size": 4}, classes=3)
    module: Any = real(chosen)
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    chosen.export(module, iter(module.named_parameters()), tmp_path, processor=None)
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), latent_channels=4, norm_num_groups=4, sample_size=4).eval()
    pipeline = diffusers.DiTPipeline(
        diffusers.DiTTransformer2DModel.from_pretrained(tmp_path), vae, diffusers.DDIMScheduler()
    )
    pipeline.set_progress_bar_config(disable=True)
    draw = torch.Generator().manual_seed(4)
    drawn = pipeline(
        [2], guidance_scale=1.0, num_inference_steps=2, generator=draw.manual_seed(4), output_type="np"
    ).images
    state, scheduler = torch.randn(1, 4, 4, 4, generator=draw.manual_seed(4)), diffusers.DDIMScheduler()
    scheduler.set_timesteps(2)
    for timestep in scheduler.timesteps:
        state = scheduler.step(module.denoise(state, timestep[None], torch.tensor([2])), timestep, state).prev_sample
    image = (vae.decode(state / vae.config.scaling_factor).sample / 2 + 0.5).clamp(0, 1)
    assert_near(torch.tensor(drawn), image.permute(0, 2, 3, 1))


def test_mistakes_have_clear_messages(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"model\.size = 'XXL/2' is not known .*Known: tiny, S/2, .*XL/8"):
        family(architecture="dit", size="XXL/2").build(processor=None)
    with pytest.raises(RecipeError, match=r"'ditt' is not a known denoiser \(did you mean 'dit'"):
        family(architecture="ditt", size="tiny").build(processor=None)
    with pytest.raises(RecipeError, match="whose inputs are not supported yet"):
        family(architecture="HunyuanDiT2DModel", overrides={"num_layers": 1}).build(processor=None)
    with pytest.raises(RecipeError, match=r"model\.size = 'B/2' is not known for SD3Transformer2DModel. Known: tiny"):
        family(architecture="sd3", size="B/2").build(processor=None)
    with pytest.raises(
        RecipeError, match=r"model\.overrides\.num_layer is not a setting of DiT.*did you mean 'num_layers'"
    ):
        family(architecture="dit", size="tiny", overrides={"num_layer": 3}).build(processor=None)
    with pytest.raises(RecipeError, match="give exactly one of model.path"):
        family(size="tiny")
    with pytest.raises(RecipeError, match=r"has no config\.json, and no transformer or unet with one"):
        family(path=str(tmp_path)).build(processor=None)
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "DiTTransformer2DModel", **SHAPE}))
    again = family(path=str(tmp_path))
    module = again.build(processor=None)
    with pytest.raises(CheckpointError, match="holds neither model.safetensors nor"):
        again.weights(module)
