"""Row slices of folders that Transformers wrote equal what Transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullshard.contracts.model import Weights
from fullshard.errors import CheckpointError
from fullshard.families.language.models.hf import Hf
from tests.near import assert_near
from tests.unit.hf.architectures import CAUSAL, build


def read_all(weights: Weights, module: torch.nn.Module, *, pieces: int = 3) -> dict[str, torch.Tensor]:
    """Every parameter, read in slices as that many ranks would."""
    values = {}
    for name, parameter in module.named_parameters():
        if name in weights.names():
            rows = parameter.shape[0]
            step = -(-rows // pieces)
            bounds = [(min(i * step, rows), min((i + 1) * step, rows)) for i in range(pieces)]
            values[name] = torch.cat([weights.read(name, start, stop) for start, stop in bounds])
    return values


def open_folder(folder: Path, **settings: Any) -> tuple[Weights, torch.nn.Module]:
    family = Hf(path=str(folder), **settings)
    module = family.build(processor=None)
    weights = family.weights(module)
    assert weights is not None
    return weights, module


@pytest.mark.parametrize("architecture", [*sorted(CAUSAL), "mixtral", "gemma3", "deepseek_v3"])
def test_slices_equal_what_transformers_loads(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    saved: Any = build(architecture).to(torch.bfloat16)
    saved.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).named_parameters())
    weights, module = open_folder(tmp_path)
    found = read_all(weights, module)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, expected[name]), name


def test_experts_are_stored_one_by_one_and_read_in_slices(tmp_path: Path) -> None:
    saved: Any = build("qwen3_moe")
    saved.save_pretrained(tmp_path)
    assert any("experts.3.gate_proj" in name for name in load_file(tmp_path / "model.safetensors"))
    weights, _ = open_folder(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(weights.read(name, 1, 3), saved.get_parameter(name)[1:3])


def test_tied_tensors_answer_to_both_names(tmp_path: Path) -> None:
    build("gemma").save_pretrained(tmp_path)  # type: ignore[operator]
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    weights, _ = open_folder(tmp_path)
    assert torch.equal(weights.read("lm_head.weight", 3, 9), weights.read("model.embed_tokens.weight", 3, 9))


def test_a_base_model_folder_loads_into_the_causal_model(tmp_path: Path) -> None:
    model: Any = build("gpt2")
    model.transformer.save_pretrained(tmp_path)
    weights, module = open_folder(tmp_path)
    assert torch.equal(weights.read("transformer.wpe.weight", 0, 4), model.transformer.wpe.weight[:4])
    assert len(read_all(weights, module)) == len(list(module.parameters()))


def test_adapters_leave_the_base_names_readable(tmp_path: Path) -> None:
    model: Any = build("llama")
    model.save_pretrained(tmp_path)
    weights, module = open_folder(tmp_path, lora={"r": 2})
    name = "model.layers.0.self_attn.q_proj.base_layer.weight"
    assert torch.equal(weights.read(name, 5, 9), model.model.layers[0].self_attn.q_proj.weight[5:9])
    missing = {n for n, _ in module.named_parameters()} - weights.names()
    assert missing
    assert all("lora_" in n for n in missing)


def test_new_rows_are_the_mean_of_the_old_ones(tmp_path: Path) -> None:
    from fullshard.hf.weights.stored_weights import SafetensorsWeights

    model: Any = build("llama")
    model.save_pretrained(tmp_path)
    family = Hf(path=str(tmp_path), overrides={"vocab_size": 1030})
    module = family.build(processor=None)
    weights = SafetensorsWeights(tmp_path, module, resized=True)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = model.get_parameter(name)
        found = torch.cat([weights.read(name, 0, 515), weights.read(name, 515, 1029), weights.read(name, 1029, 1030)])
        assert torch.equal(found[:1024], old)
        assert_near(found[1024:], old.mean(0).expand(6, -1), within=1e-6)
    with pytest.raises(CheckpointError, match="of another shape"):
        SafetensorsWeights(tmp_path, module, resized=False)


def test_problems_are_listed(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["extra.weight"] = torch.zeros(2)
    tensors["model.norm.weight"] = torch.zeros(3)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        open_folder(tmp_path)
    message = str(caught.value)
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in message
    assert "1 not part of the model: extra.weight" in message
    assert "1 of another shape: model.norm.weight [3] (the model has [128])" in message


def test_tied_names_with_different_values_are_refused(tmp_path: Path) -> None:
    build("gemma").save_pretrained(tmp_path)  # type: ignore[operator]
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="different values.*tie_word_embeddings"):
        open_folder(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors \([\d,]+ bytes\) is truncated"):
        open_folder(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path, max_shard_size="300KB")  # type: ignore[operator]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    gone = sorted(set(index["weight_map"].values()))[1]
    (tmp_path / gone).unlink()
    with pytest.raises(CheckpointError, match=f"1 of .* weight files are missing: {gone}"):
        open_folder(tmp_path)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    build("llama").config.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin but no safetensors.*save_pretrained"):
        open_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="neither model.safetensors nor"):
        open_folder(tmp_path)
