"""What is written is read back by the ecosystem's own loaders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fullshard.errors import CheckpointError
from fullshard.families.language.models.hf import Hf
from fullshard.hf.export import Form, export_model
from tests.near import assert_near
from tests.unit.hf.architectures import CAUSAL, build

IDS = torch.arange(24).mul(5).remainder(89).add(3).reshape(2, 12)


def real(family: Hf, *, processor: Any = None) -> nn.Module:
    """The family's module with its values, in one process."""
    module = family.build(processor=processor)
    weights = family.weights(module)
    module.to_empty(device="cpu") if weights is None else None
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if parameter.is_meta:
            owner, _, key = name.rpartition(".")
            stored = weights.read(name, 0, parameter.shape[0]).float() if weights and name in weights.names() else None
            value = torch.randn(parameter.shape) * 0.1 if stored is None else stored
            module.get_submodule(owner)._parameters[key] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    model: Any = module
    model.tie_weights()
    return module.eval()


def tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, parameter.detach()) for name, parameter in module.named_parameters())


@torch.no_grad()
@pytest.mark.parametrize("architecture", sorted(CAUSAL))
def test_export_loads_in_transformers_and_gives_the_same_logits(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    build(architecture).save_pretrained(tmp_path / "start")  # type: ignore[operator]
    family = Hf(path=str(tmp_path / "start"))
    module = real(family)
    for parameter in module.parameters():
        parameter.add_(0.01)
    family.export(module, tensors(module), tmp_path / "out", processor=None)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.config.use_cache
    start, out = (set(load_file(tmp_path / name / "model.safetensors")) for name in ("start", "out"))
    assert out == start, "stored under the names it was stored under before"
    assert torch.equal(loaded.eval()(input_ids=IDS).logits, module(input_ids=IDS, use_cache=False).logits)


def test_files_are_split_by_size_and_the_dtype_is_the_starts(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    start: Any = build("gemma").to(torch.bfloat16)
    start.save_pretrained(tmp_path / "start")
    family = Hf(path=str(tmp_path / "start"))
    module = real(family)
    out = tmp_path / "out"
    source = tmp_path / "start"
    named = ((n, p.detach()) for n, p in module.named_parameters(remove_duplicate=False))
    export_model(module, named, out, Form(torch.bfloat16, 200_000), source=source, processor=None)
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 1
    stored = {name: t for file in files for name, t in load_file(out / file).items()}
    assert "lm_head.weight" not in stored, "tied weights are written once"
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert all(torch.equal(p, start.get_parameter(n)) for n, p in loaded.named_parameters())
    assert loaded.dtype == torch.bfloat16


def test_from_scratch_is_written_in_float32_with_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = ["the quick brown fox jumps over the lazy dog"] * 20
    tokenizer = {"train": {"vocab_size": 300}}
    family = Hf(architecture="qwen3", size="tiny", tokenizer=tokenizer)  # type: ignore[arg-type]
    family.prepare(texts, cache=tmp_path / "cache")
    processor = family.processor(cache=tmp_path / "cache")
    module: Any = real(family, processor=processor)
    assert module.config.vocab_size == len(processor)
    family.export(module, tensors(module), tmp_path / "out", processor=processor)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.float32
    assert loaded.generation_config.eos_token_id == processor.eos_token_id
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again("lazy fox").input_ids == processor("lazy fox").input_ids
    assert again.decode(again("lazy fox ☃").input_ids) == "lazy fox ☃"


def test_an_incomplete_export_is_refused(tmp_path: Path) -> None:
    family = Hf(architecture="llama", size="tiny")
    module = real(family)
    some = ((name, t) for name, t in tensors(module) if "layers.1" not in name)
    with pytest.raises(CheckpointError, match="incomplete, 9 of 21 parameters"):
        family.export(module, some, tmp_path, processor=None)


# peft notes a rank for fused experts by itself, and warns about its own note when it loads.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3_moe"])
def test_adapters_load_in_peft_and_give_the_same_logits(architecture: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    build(architecture).save_pretrained(tmp_path / "base")  # type: ignore[operator]
    family = Hf(path=str(tmp_path / "base"), lora={"r": 4, "alpha": 8})  # type: ignore[arg-type]
    module = real(family)
    trainable = {n for n, p in module.named_parameters() if p.requires_grad}
    assert trainable
    assert all("lora_" in name for name in trainable)
    family.export(module, tensors(module), tmp_path / "adapter", processor=None)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain = base.eval()(input_ids=IDS).logits
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    expected = module(input_ids=IDS, use_cache=False).logits
    assert not torch.allclose(expected, plain, atol=1e-3), "the adapters do something"
    assert_near(loaded(input_ids=IDS).logits, expected)
    assert loaded.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")


def adapters_first(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(sorted(tensors(module), key=lambda pair: ".lora_" not in pair[0]))


def lora(path: Path, targets: str | list[str]) -> Hf:
    return Hf(path=str(path), lora={"r": 4, "alpha": 8, "targets": targets})  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        ("llama", "all-linear"),
        ("gpt2", "all-linear"),  # transposed matrices
        ("qwen3_moe", "all-linear"),  # fused experts, stored one by one
        ("llama", ["embed_tokens", "lm_head", "q_proj"]),
    ],
    ids=["llama", "gpt2", "qwen3_moe", "embedding"],
)
@torch.no_grad()
def test_merged_weights_are_those_of_peft(
    architecture: str, targets: str | list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("fullshard.checkpoint.tensor_files._ROWS_BYTES", 1000)  # a few rows at a time
    build(architecture).save_pretrained(tmp_path / "base")  # type: ignore[operator]
    family = lora(tmp_path / "base", targets)
    module = real(family)
    family.export(module, tensors(module), tmp_path / "adapter", processor=None)
    family.export(module, adapters_first(module), tmp_path / "out", processor=None, merged=True, shard_bytes=50_000)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    expected = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload().state_dict()
    assert any(not torch.allclose(expected[name], tensor, atol=1e-3) for name, tensor in before.items())
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, tensor in expected.items():
        assert_near(loaded.state_dict()[name], tensor, within=1e-6)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == load_file(tmp_path / "base" / "model.safetensors").keys()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_adapters_that_cannot_be_merged_are_refused(tmp_path: Path) -> None:
    build("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "tied")  # type: ignore[operator]
    module = real(family := lora(tmp_path / "tied", ["embed_tokens"]))
    with pytest.raises(CheckpointError, match="merging would change both"):
        family.export(module, adapters_first(module), tmp_path / "out", processor=None, merged=True)
    module = real(family := lora(tmp_path / "tied", ["q_proj"]))
    with pytest.raises(CheckpointError, match="missing, or received after the adapted weight"):
        family.export(module, tensors(module), tmp_path / "out", processor=None, merged=True)


def drawn(family: Hf) -> nn.Module:
    """A module from scratch with values."""
    module = real(family)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def test_a_file_ends_between_blocks_and_is_never_too_large(tmp_path: Path) -> None:
    family = Hf(architecture="llama", size="tiny", overrides={"num_hidden_layers": 4})
    module = drawn(family)
    block = sum(p.nbytes for p in module.get_submodule("model.layers.0").parameters())
    largest = max(p.nbytes for p in module.parameters())
    assert largest < block
    for folder, limit in (("by block", int(2.5 * block)), ("by tensor", largest)):
        family.export(module, tensors(module), tmp_path / folder, processor=None, shard_bytes=limit)
        files = [load_file(path) for path in sorted((tmp_path / folder).glob("*.safetensors"))]
        assert max(sum(t.nbytes for t in file.values()) for file in files) <= limit
        stored = {name: tensor for file in files for name, tensor in file.items()}
        assert all(torch.equal(stored[name], p) for name, p in tensors(module))
    blocks = [
        {name.split(".")[2] for name in load_file(p) if ".layers." in name}
        for p in sorted((tmp_path / "by block").glob("*.safetensors"))
    ]
    assert sum(map(len, blocks)) == 4, "no block lies in two files"


def test_a_stored_tensor_made_of_several_is_put_together_again(tmp_path: Path) -> None:
    from transformers.core_model_loading import Chunk, WeightConverter

    module: Any = drawn(Hf(architecture="llama", size="tiny"))
    parts = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    fused = WeightConverter(source_patterns="mlp.fused.weight", target_patterns=parts, operations=[Chunk(dim=0)])
    module._weight_conversions = [fused]
    export_model(module, tensors(module), tmp_path, Form(shard_bytes=60_000), source=None, processor=None)
    stored = {name: t for path in tmp_path.glob("*.safetensors") for name, t in load_file(path).items()}
    layers = range(module.config.num_hidden_layers)
    assert not any(name.endswith(tuple(parts)) for name in stored)
    for layer in layers:
        whole = torch.cat([module.get_parameter(f"model.layers.{layer}.{part}") for part in parts])
        assert torch.equal(stored[f"model.layers.{layer}.mlp.fused.weight"], whole)
    assert len(stored) == len(list(module.parameters())) - len(layers)
