"""The model section of a check, on real small models: each fault is found, healthy models have ticks only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fullshard.check import model as check
from fullshard.check.findings import Finding
from fullshard.check.units import units_table
from fullshard.contracts.launcher import Ranks
from fullshard.dist.wrap import WrapPlan
from fullshard.errors import RecipeError
from fullshard.families.language.models.hf import Hf
from fullshard.log.console import Console
from fullshard.recipes.read import read
from fullshard.setup.run_inputs import prepare_inputs
from tests import small
from tests.unit.hf.architectures import CAUSAL

Look = Callable[..., list[Finding]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small.model_folder(tmp_path / "model")
    small.token_file(tmp_path / "train.jsonl", records=16)
    return tmp_path


def look(folder: Path, *, ranks: Ranks | None = None, data_known: bool = True, **sections: Any) -> list[Finding]:
    reading = read(small.recipe(folder, **sections))
    inputs = prepare_inputs(reading.recipe, world_size=1, console=Console(silent=True)) if data_known else None
    module = reading.recipe.model.build(processor=inputs.processor if inputs else None)
    return list(check.look(reading.recipe, inputs, module=module, ranks=ranks))


def bad(findings: list[Finding]) -> list[Finding]:
    assert all(f.text for f in findings)
    return [f for f in findings if f.level != "ok"]


def said(findings: list[Finding]) -> dict[str, str]:
    return {f.check: f.text for f in findings}


def scratch(architecture: str, **model: Any) -> dict[str, Any]:
    return {"path": None, "architecture": architecture, "size": "tiny", **model}


def test_a_healthy_folder_has_ticks_only(folder: Path) -> None:
    findings = look(folder, precision="bf16", ranks=Ranks(2))
    assert bad(findings) == []
    text = said(findings)
    assert list(text) == [
        "parameters",
        "units",
        "tied parameters",
        "weight files",
        "stored values",
        "weights",
        "dtypes",
        "positions",
        "vocabulary",
    ]
    assert text["units"] == "4: 3 x Qwen3DecoderLayer in model.layers"
    assert text["tied parameters"] == "model.embed_tokens.weight = lm_head.weight"
    used = "compute torch.bfloat16, reduce torch.float32"
    assert text["dtypes"] == f"torch.float32 (trained); {used}; the files hold torch.float32"
    assert text["positions"] == "data.sequence_length = 48, the model has 128 positions"
    assert text["vocabulary"] == "tokens up to 96 in 16 samples, 97 embedding rows"


@pytest.mark.parametrize("architecture", sorted(CAUSAL))
def test_healthy_architectures_have_ticks_only(architecture: str, folder: Path) -> None:
    assert bad(look(folder, model=scratch(architecture), precision="bf16", data_known=False)) == []


def test_stored_half_precision_is_trained_in_fp32_and_frozen_as_it_is(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model")
    model.to(torch.float16).save_pretrained(folder / "model")
    text = said(look(folder))
    used = "compute torch.float32, reduce torch.float32; the files hold torch.float16"
    assert text["dtypes"] == f"torch.float32 (trained); {used}"
    findings = look(folder, model={"lora": {"r": 2, "targets": ["q_proj"]}})
    assert bad(findings) == []
    assert said(findings)["dtypes"] == f"torch.float32 (trained), torch.float16 (frozen); {used}"
    assert "384 of them trained (1.43%)" in said(findings)["parameters"]


def test_a_tokenizer_trained_on_the_data_has_ticks_only(folder: Path) -> None:
    records = [{"question": f"What is {i} and {i}?", "answer": f"It is {2 * i}."} for i in range(40)]
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    findings = look(folder, model=scratch("llama", tokenizer={"train": 300}))
    assert bad(findings) == []
    assert said(findings)["round trip"] == "80 sample texts survive exactly, and so do other scripts"
    assert said(findings)["chat template"].startswith("plain")


def test_adapters_as_large_as_the_model(folder: Path) -> None:
    (finding,) = bad(look(folder, model={"lora": {"r": 64}}))
    assert (finding.level, finding.check) == ("warning", "parameters")
    assert "model.lora: " in finding.text
    assert bad(look(folder, model={"lora": {"r": 2}})) == []


def test_nothing_to_train() -> None:
    module = nn.Linear(2, 3).requires_grad_(False)
    (finding,) = check.parameters(module, adapters=False)
    assert finding.level == "error"
    assert "all 2 parameters are frozen" in finding.text
    assert "weight, bias" in finding.remedy


@pytest.mark.parametrize("lora", [None, 2])
def test_frozen_to_the_last_parameter_is_refused_with_names(folder: Path, lora: int | None) -> None:
    words = r"no trainable parameter: model.freeze freezes all of its \d+ parameters.*model.embed_tokens.weight"
    with pytest.raises(RecipeError, match=words):
        look(folder, model=scratch("llama", lora=lora, freeze=["*"]))


@pytest.mark.parametrize(
    ("architecture", "targets", "message"),
    [
        ("llama", ["q_proj", "v_prj"], r"did you mean 'v_proj'\?\): no module is called 'v_prj'.*names from: .*q_proj"),
        ("llama", "nothing.*", r"not found in the base model.*names from: down_proj, gate_proj, k_proj"),
        ("gpt2", ["q_proj"], r"no module is called 'q_proj'. Use all-linear, or names from: c_attn, c_fc, c_proj"),
    ],
)
def test_adapters_that_match_nothing_are_refused_with_names(architecture: str, targets: Any, message: str) -> None:
    settings = {"architecture": architecture, "size": "tiny", "lora": {"r": 2, "targets": targets}}
    with pytest.raises(RecipeError, match=message):
        Hf.model_validate(settings).build(processor=None)


def test_missing_blocks(folder: Path) -> None:
    (finding,) = bad(look(folder, sharding={"wrap": "LlamaDecoderLayer"}))
    assert (finding.level, finding.check) == ("error", "units")
    assert "no module of class 'LlamaDecoderLayer'" in finding.text


def large(**changes: int) -> nn.Module:
    """About 135 million parameters, on meta."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 1000, **changes}
    family = Hf.model_validate({"architecture": "llama", "overrides": shape | {"num_attention_heads": 8}})
    return family.build(processor=None)


def test_one_unit_that_is_most_of_a_large_model() -> None:
    module = large()
    (finding,) = check.unit_sizes(module, WrapPlan([], reason="one unit for the whole model, as requested"))
    assert finding.level == "warning"
    assert "the root holds 13" in finding.text
    blocks = [f"model.layers.{i}" for i in range(8)]
    assert [f.level for f in check.unit_sizes(module, WrapPlan(blocks))] == ["ok"]
    small_model = nn.Linear(4, 4)
    assert [f.level for f in check.unit_sizes(small_model, WrapPlan([]))] == ["ok"]


def test_a_vocabulary_that_is_most_of_the_model_is_no_fault() -> None:
    module = large(num_hidden_layers=2, vocab_size=120_000, tie_word_embeddings=True)
    blocks = ["model.layers.0", "model.layers.1"]
    assert [f.level for f in check.unit_sizes(module, WrapPlan(blocks))] == ["ok"]


def test_ties_across_units() -> None:
    module = Hf(architecture="gpt2", size="tiny").build(processor=None)
    (finding,) = check.ties(module, WrapPlan(["lm_head"]))
    assert finding.level == "error"
    assert "belong to different units: lm_head, the root" in finding.text
    assert [f.level for f in check.ties(module, WrapPlan(["transformer.h.0"]))] == ["ok"]


def test_the_units_that_the_model_will_have(folder: Path) -> None:
    recipe = read(small.recipe(folder, precision="bf16", model={"lora": {"r": 2, "targets": ["q_proj"]}})).recipe
    module = recipe.model.build(processor=None)
    before = {name: p.dtype for name, p in module.named_parameters()}
    units = check.planned_units(recipe, module, Ranks(2))
    assert [(u.name, u.class_name, u.trainable) for u in units] == [
        *((f"model.layers.{i}", "Qwen3DecoderLayer", 128) for i in range(3)),
        ("(root)", "Qwen3ForCausalLM", 0),
    ]
    assert {(u.compute, u.reduce) for u in units} == {("bfloat16", "float32")}
    assert units[-1].tied == [["model.embed_tokens.weight", "lm_head.weight"]]
    assert sum(u.parameters for u in units) == sum(p.numel() for p in module.parameters())
    assert {name: p.dtype for name, p in module.named_parameters()} == before
    assert "model.layers.0-2 (3 units)" in units_table(units)


def test_more_tokens_than_positions(folder: Path) -> None:
    recipe = read(small.recipe(folder, data={"sequence_length": 256})).recipe
    (finding,) = bad(list(check.shape(recipe, recipe.model.build(processor=None))))
    assert (finding.level, finding.check) == ("error", "positions")
    assert "data.sequence_length = 256, but the model has only 128 positions" in finding.text
    assert "max_position_embeddings=256" in finding.remedy


def test_heads_that_do_not_share_keys_evenly(folder: Path) -> None:
    overrides = {"num_attention_heads": 4, "num_key_value_heads": 3}
    (finding,) = bad(look(folder, model=scratch("qwen3", overrides=overrides), data_known=False))
    assert (finding.level, finding.check) == ("error", "config")
    assert "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3" in finding.text


def test_tokens_of_another_vocabulary(folder: Path) -> None:
    (folder / "train.jsonl").write_text(json.dumps({"input_ids": [1, 2, 97]}) + "\n")
    (finding,) = bad(look(folder))
    assert (finding.level, finding.check) == ("error", "vocabulary")
    assert "contains the token 97" in finding.text


def rewrite(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


NAME = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda t: t.pop(NAME), rf"1 missing: {NAME}"),
        (lambda t: t.update({"model.extra.weight": torch.ones(3)}), "1 not part of the model: model.extra.weight"),
        (lambda t: t.update({NAME: torch.ones(32, 31)}), rf"1 of another shape: {NAME}"),
    ],
)
def test_weights_of_another_model(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None], text: str) -> None:
    rewrite(folder, edit)
    (finding,) = bad(look(folder))
    assert (finding.level, finding.check) == ("error", "weights")
    assert text in finding.text


def test_a_truncated_file_is_one_finding(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    (finding,) = bad(look(folder))
    assert (finding.level, finding.check) == ("error", "weight files")
    assert "(100 are missing)" in finding.text


def test_no_weights_at_all(folder: Path) -> None:
    reading = read(small.recipe(folder))
    module = reading.recipe.model.build(processor=None)
    (folder / "model" / "model.safetensors").unlink()
    (finding,) = bad(list(check.weights(reading.recipe, module)))
    assert (finding.level, finding.check) == ("error", "weight files")
    assert "neither model.safetensors nor" in finding.text


def test_pure_bf16_shows_in_the_dtypes(folder: Path) -> None:
    text = said(look(folder, precision="bf16-pure"))["dtypes"]
    assert "torch.bfloat16 (trained); compute torch.bfloat16, reduce torch.float32" in text


class RoundingNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)))


def test_a_norm_that_rounds_its_statistics(folder: Path) -> None:
    recipe = read(small.recipe(folder, precision="bf16", model=scratch("llama"))).recipe
    module: Any = recipe.model.build(processor=None)
    module.model.norm = RoundingNorm(128)
    (finding,) = bad(list(check.look(recipe, None, module=module)))
    assert (finding.level, finding.check) == ("warning", "norms")
    assert "model.norm: RoundingNorm computes its statistics in bfloat16" in finding.text


def test_shared_batch_norm_statistics(folder: Path) -> None:
    sync = {"sync_batchnorm": True}
    findings = look(folder, ranks=Ranks(2), sharding=sync)
    assert (bad(findings), "batch norm" in said(findings)) == ([], True)
    recipe = read(small.recipe(folder, sharding=sync)).recipe
    module: Any = recipe.model.build(processor=None)
    module.extra = nn.BatchNorm1d(4)
    found = [f for f in check.look(recipe, None, module=module, ranks=Ranks(2)) if f.check == "batch norm"]
    assert [f.level for f in found] == ["error"]
