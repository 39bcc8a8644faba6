"""Adapters of every class of denoiser: read by diffusers or peft with the same prediction, merged, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.errors import CheckpointError, RecipeError
from fullshard.hf.adapters.edits import is_adapter
from tests.families.diffusion.denoisers import CLASSES, by_hand, family, inputs, real, stored
from tests.near import assert_near

LORA = {"r": 3, "alpha": 9}


def base_folder(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    chosen = family(name)
    module = real(chosen)
    chosen.export(module, iter(module.named_parameters()), folder / "base", processor=None, dtype=dtype)
    return folder / "base"


def adapted(base: Path, **lora: Any) -> tuple[Any, Any]:
    """A family with adapters over stored weights, and its module with values for all."""
    chosen = stored(base, lora={**LORA, **lora})
    module = real(chosen, seed=5)
    weights = chosen.weights(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in weights.names():
                parameter.copy_(weights.read(name, 0, len(parameter)))
        for name, buffer in module.named_buffers():
            if name in weights.names():
                buffer.copy_(weights.read(name, 0, len(buffer)))
    return chosen, module


def load(name: str, base: Path, folder: Path) -> Any:
    """By the ecosystem's own loader."""
    import diffusers
    import peft

    model = diffusers.AutoModel.from_pretrained(str(base))
    if not hasattr(model, "load_lora_adapter"):
        return peft.PeftModel.from_pretrained(model, str(folder)).eval()
    prefix = "unet" if name == "unet_text" else "transformer"
    model.load_lora_adapter(str(folder), weight_name="pytorch_lora_weights.safetensors", prefix=prefix)
    return model.eval()


def by_line(chosen: Any, folder: Path) -> Any:
    """By the line that a run prints."""
    import diffusers
    import peft

    line = chosen.load_with(str(folder), adapter=True)
    names = {"diffusers": diffusers, "peft": peft}
    if not line.startswith("model = "):
        return eval(line, names).eval()
    exec(line, names)
    return names["model"].eval()


@pytest.mark.parametrize("name", CLASSES)
@torch.no_grad()
def test_adapters_are_read_by_diffusers_and_merged(tmp_path: Path, name: str) -> None:
    import diffusers

    base = base_folder(tmp_path, name)
    chosen, module = adapted(base)
    given = inputs(module)
    found = module.denoise(*given)
    theirs = diffusers.AutoModel.from_pretrained(str(base)).eval()
    assert not torch.allclose(found, by_hand(name, theirs, *given), atol=1e-3), "the adapters do nothing"
    tensors = {key: value for key, value in module.named_parameters() if chosen.exports(module, key)}
    assert tensors
    assert all(is_adapter(key) for key in tensors)
    chosen.export(module, iter(tensors.items()), tmp_path / "adapter", processor=None)
    for loaded in (load(name, base, tmp_path / "adapter"), by_line(chosen, tmp_path / "adapter")):
        assert_near(found, by_hand(name, loaded, *given))
    # Adapters first, as an export gives them.
    ordered = sorted(module.named_parameters(), key=lambda pair: not is_adapter(pair[0]))
    chosen.export(module, iter(ordered), tmp_path / "merged", processor=None, merged=True)
    whole = diffusers.AutoModel.from_pretrained(str(tmp_path / "merged")).eval()
    assert type(whole) is type(theirs)
    assert_near(found, by_hand(name, whole, *given))


@pytest.mark.parametrize("name", ["sd3", "flux", "unet_text"])
def test_a_pipeline_takes_the_adapters(tmp_path: Path, name: str) -> None:
    import diffusers

    pipelines = {"sd3": "StableDiffusion3Pipeline", "flux": "FluxPipeline", "unet_text": "StableDiffusionPipeline"}
    pipeline = getattr(diffusers, pipelines[name])
    base = base_folder(tmp_path, name)
    chosen, module = adapted(base)
    chosen.export(module, iter(module.named_parameters()), tmp_path / "adapter", processor=None)
    state, *rest = pipeline.lora_state_dict(str(tmp_path / "adapter"), return_lora_metadata=True)
    model = diffusers.AutoModel.from_pretrained(str(base)).eval()
    if name == "unet_text":
        pipeline.load_lora_into_unet(state, network_alphas=rest[0], unet=model, metadata=rest[-1])
    else:
        alphas = {"network_alphas": None} if name == "flux" else {}
        pipeline.load_lora_into_transformer(state, transformer=model, metadata=rest[-1], **alphas)
    given = inputs(module)
    with torch.no_grad():
        assert_near(module.denoise(*given), by_hand(name, model, *given))


def test_the_printed_line_names_the_base_wherever_it_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path becomes a whole one; in a pipeline its part is named; without a base there is no such line."""
    base_folder(tmp_path, "sd3").rename(tmp_path / "transformer")
    base_folder(tmp_path, "dit")
    monkeypatch.chdir(tmp_path)
    chosen = stored("base", lora=LORA)
    line = f"peft.PeftModel.from_pretrained(diffusers.AutoModel.from_pretrained({str(tmp_path / 'base')!r}), 'out')"
    assert chosen.load_with("out", adapter=True) == line
    named: Any = chosen.build(processor=None).peft_config["default"]
    assert named.base_model_name_or_path == str(tmp_path / "base")
    pipeline = f"pipeline = diffusers.DiffusionPipeline.from_pretrained({str(tmp_path)!r})"
    line = stored(".", lora=LORA).load_with("out", adapter=True)
    assert line == f"{pipeline}; pipeline.load_lora_weights('out')"
    assert family("sd3", lora=LORA).load_with("out", adapter=True) is None


@torch.no_grad()
def test_new_adapters_change_nothing_and_leave_the_head(tmp_path: Path) -> None:
    from peft.tuners.lora import LoraLayer

    chosen = stored(base_folder(tmp_path, "sd3", torch.bfloat16), lora=True)
    module = chosen.build(processor=None)
    layers = {name for name, part in module.named_modules() if isinstance(part, LoraLayer)}
    linear = {name for name, part in module.named_modules() if isinstance(part, nn.Linear) and "lora_" not in name}
    assert {name.removesuffix(".base_layer") for name in linear} - layers == {"proj_out"}
    kept = {(is_adapter(name), p.requires_grad, chosen.storage_dtype(name, p)) for name, p in module.named_parameters()}
    assert kept == {(True, True, torch.float32), (False, False, torch.bfloat16)}
    for parameter in module.to_empty(device="cpu").parameters():
        parameter.fill_(float("nan"))
    chosen.initialise(module, root=module)
    assert all(bool(p.isfinite().all()) for p in module.parameters())
    for name, parameter in module.named_parameters():
        if is_adapter(name):
            assert bool(parameter.any()) == ("lora_A" in name), name


def test_mistakes_have_clear_messages(tmp_path: Path) -> None:
    base = base_folder(tmp_path, "sd3")
    with pytest.raises(RecipeError, match=r"model\.lora\.targets = \['to_qq'\] does not fit .*did you mean 'to_q'"):
        stored(base, lora={"targets": ["to_qq"]}).build(processor=None)
    chosen, module = adapted(base, targets=["to_q", "to_k"])
    with pytest.raises(CheckpointError, match="the export is incomplete, 8 of .* adapter tensors are missing"):
        chosen.export(module, iter([]), tmp_path / "none", processor=None)
    ordered = sorted(module.named_parameters(), key=lambda pair: not is_adapter(pair[0]))
    with pytest.raises(CheckpointError, match="the export is incomplete, 1 of .* parameters are missing"):
        chosen.export(module, iter(ordered[:-1]), tmp_path / "half", processor=None, merged=True)
