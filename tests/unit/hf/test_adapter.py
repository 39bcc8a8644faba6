"""PEFT adapter folders: what peft wrote is read back tensor by tensor, and what cannot be trained is refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullshard.errors import CheckpointError, RecipeError
from fullshard.families.language.models.hf import Hf
from tests.unit.hf.architectures import build

SETTINGS: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 6,
    "lora_dropout": 0.1,
    "target_modules": ["q_proj", "up_proj"],
    "rank_pattern": {"up_proj": 2},
    "alpha_pattern": {"q_proj": 3},
    "use_rslora": True,
}


def save(folder: Path, architecture: str, **settings: Any) -> tuple[Path, Any]:
    """A base model and an adapter that peft saved, with random values in all of its matrices."""
    from peft import LoraConfig, get_peft_model

    model: Any = build(architecture)
    model.save_pretrained(folder / "base")
    model.name_or_path = str(folder / "base")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*_pattern keys did not match")  # peft adds them itself
        peft: Any = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(1)
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    peft.save_pretrained(folder / "adapter")
    return folder / "adapter", peft


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any]:
    return save(tmp_path, "llama", **SETTINGS)


def change(adapter: Path, **settings: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", SETTINGS),
        ("gpt2", {"target_modules": "all-linear", "fan_in_fan_out": True}),
        ("qwen3_moe", {"target_modules": "all-linear"}),
        ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}),
    ],
)
def test_every_tensor_comes_back(architecture: str, settings: dict[str, Any], tmp_path: Path) -> None:
    adapter, peft = save(tmp_path, architecture, **settings)
    family = Hf(path=str(adapter))
    module = family.build(processor=None)
    weights = family.weights(module)
    assert weights is not None
    parameters = dict(module.named_parameters())
    assert parameters.keys() <= weights.names(), "base and adapters, nothing is left to chance"
    expected = {name.removeprefix("base_model.model."): p for name, p in peft.named_parameters()}
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        half = parameter.shape[0] // 2
        found = torch.cat([weights.read(name, 0, half), weights.read(name, half, parameter.shape[0])])
        assert torch.equal(found, expected[name]), name
    assert {n for n, p in parameters.items() if p.requires_grad} == {n for n in parameters if "lora_" in n}


def test_settings_are_those_of_the_adapter(saved: tuple[Path, Any]) -> None:
    adapter, _ = saved
    family = Hf(path=str(adapter))
    module = family.build(processor=None)
    layer: Any = module.get_submodule("model.layers.0.self_attn.q_proj")
    assert layer.scaling["default"] == pytest.approx(3 / 4**0.5), "alpha of the pattern, rank-stabilised"
    assert layer.lora_dropout["default"].p == 0.1
    assert tuple(module.get_parameter("model.layers.0.mlp.up_proj.lora_A.default.weight").shape) == (2, 128)
    assert family.stored_in() == adapter.parent / "base"


def test_pickled_adapters_are_read_and_hostile_ones_are_not_run(saved: tuple[Path, Any], tmp_path: Path) -> None:
    adapter, _ = saved
    file = adapter / "adapter_model.safetensors"
    torch.save(load_file(file), adapter / "adapter_model.bin")
    file.unlink()
    family = Hf(path=str(adapter))
    module = family.build(processor=None)
    assert family.weights(module) is not None
    torch.save({"x": Payload(tmp_path / "ran")}, adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin holds more than tensors \(posix\.system\)"):
        family.weights(module)
    assert not (tmp_path / "ran").exists()


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        import os

        return os.system, (f"touch {self.file}",)


def test_names_are_strict_both_ways(saved: tuple[Path, Any]) -> None:
    adapter, _ = saved
    tensors = load_file(adapter / "adapter_model.safetensors")
    gone = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    other = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    changed = {**tensors, "base_model.model.lm_head.weight": torch.zeros(2), other: torch.zeros(5, 128)}
    del changed[gone]
    save_file(changed, adapter / "adapter_model.safetensors")
    family = Hf(path=str(adapter))
    with pytest.raises(CheckpointError) as caught:
        family.weights(family.build(processor=None))
    message = str(caught.value)
    assert f"1 missing: {gone}" in message
    assert "1 not part of the model: base_model.model.lm_head.weight" in message
    assert f"1 of another shape: {other} [5, 128] (the model has [4, 128])" in message
    assert "model.base" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type = IA3, but only LORA"),
        ({"use_dora": True}, "use_dora = true cannot be trained here. Merge it"),
        ({"modules_to_save": ["lm_head"]}, r'modules_to_save = \["lm_head"\] cannot'),
        ({"bias": "all"}, 'bias = "all" cannot'),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights = "pissa" cannot'),
        ({"task_type": "SEQ_CLS"}, "task_type = SEQ_CLS"),
        ({"of_tomorrow": 3}, "the installed peft does not know of_tomorrow.*pip install -U peft"),
        ({"target_modules": ["nowhere"]}, "does not fit its base.*model.base"),
    ],
)
def test_what_cannot_be_trained_is_refused(saved: tuple[Path, Any], settings: Any, message: str) -> None:
    adapter, _ = saved
    change(adapter, **settings)
    with pytest.raises(RecipeError, match=message):
        Hf(path=str(adapter)).build(processor=None)


def test_the_base_may_have_moved(saved: tuple[Path, Any], tmp_path: Path) -> None:
    adapter, _ = saved
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(
        RecipeError, match=r"base_model_name_or_path = '.*base', but there is no such folder.*model\.base"
    ):
        Hf(path=str(adapter)).prepare([], cache=tmp_path)
    family = Hf(path=str(adapter), base=str(tmp_path / "moved"))
    family.prepare([], cache=tmp_path)
    module: Any = family.build(processor=None)
    assert module.peft_config["default"].base_model_name_or_path == str(tmp_path / "moved"), "what an export names"
    with pytest.raises(RecipeError, match=r"model\.base = .*is not an adapter \(it has no adapter_config.json\)"):
        Hf(path=str(tmp_path / "moved"), base="x").prepare([], cache=tmp_path)


def test_new_settings_beside_an_adapter_are_refused(saved: tuple[Path, Any], tmp_path: Path) -> None:
    adapter, _ = saved
    with pytest.raises(RecipeError, match=r"model\.lora: .* is a PEFT adapter, which is trained further"):
        Hf(path=str(adapter), lora={"r": 2}).prepare([], cache=tmp_path)  # type: ignore[arg-type]
    save_file({"x": torch.zeros(1)}, adapter / "model.safetensors")
    with pytest.raises(RecipeError, match="holds a whole model and a PEFT adapter beside it"):
        Hf(path=str(adapter)).prepare([], cache=tmp_path)
