"""Fresh values one unit at a time equal Transformers' own initialisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullshard.dist.wrap import find_blocks, unit_parameters
from fullshard.families.language.models.hf import Hf
from tests.unit.hf.architectures import CAUSAL, build


def fill(family: Hf, module: nn.Module) -> dict[str, torch.Tensor]:
    """What a sharded run does: makes one unit real at a time, initialises it, and lets it go again."""
    values: dict[str, torch.Tensor] = {}
    torch.manual_seed(11)
    for unit, members in unit_parameters(module, find_blocks(module)).items():
        owners = [(name, module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in members]
        meta = {name: owner._parameters[key] for name, owner, key in owners}
        for name, owner, key in owners:
            shape = meta[name].shape  # type: ignore[union-attr]
            owner._parameters[key] = nn.Parameter(torch.full(shape, float("nan")), requires_grad=False)
        family.initialise(module.get_submodule(unit), root=module)
        for name, owner, key in owners:
            values[name] = owner._parameters[key].clone()  # type: ignore[union-attr]
            owner._parameters[key] = meta[name]
    return values


@pytest.mark.parametrize("architecture", sorted(CAUSAL))
def test_every_parameter_is_distributed_as_in_transformers(architecture: str) -> None:
    family = Hf(architecture=architecture, size="tiny", overrides={"pad_token_id": 5})
    values = fill(family, family.build(processor=None))
    plain = {n: p.detach() for n, p in build(architecture, pad_token_id=5).named_parameters()}
    assert values.keys() == plain.keys()
    for name, expected in plain.items():
        found = values[name]
        assert torch.isfinite(found).all(), name
        if float(expected.std(correction=0)) == 0:
            assert torch.equal(found, expected), f"{name} is constant in Transformers"
        else:
            spread = 6 / found.numel() ** 0.5
            assert float(found.std()) == pytest.approx(float(expected.std()), rel=spread + 0.02), name
            assert abs(float(found.mean() - expected.mean())) < 2 * spread * float(expected.std()), name


def test_padding_row_is_zero_also_where_the_head_is_tied() -> None:
    family = Hf(architecture="gemma", size="tiny", overrides={"pad_token_id": 5})
    embedding = fill(family, family.build(processor=None))["model.embed_tokens.weight"]
    assert torch.count_nonzero(embedding[5]) == 0
    assert torch.count_nonzero(embedding[6]) > 0
    module: Any = build("gemma", pad_token_id=5)
    family.initialise(module, root=module)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert torch.count_nonzero(module.lm_head.weight[5]) == 0, "the head's own rule does not come on top"


def test_a_real_model_at_once_equals_init_weights_bit_by_bit() -> None:
    ours: Any = build("gpt2")
    theirs: Any = build("gpt2")
    for module in theirs.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    torch.manual_seed(4)
    Hf(architecture="gpt2", size="tiny").initialise(ours, root=ours)
    # The head is tied: its own draw is thrown away in Transformers, so the comparison stops before it.
    torch.manual_seed(4)
    theirs.initialize_weights()
    for name, expected in theirs.named_parameters():
        if name != "transformer.wte.weight":
            assert torch.equal(ours.get_parameter(name), expected), name


def test_tensors_outside_the_unit_are_left_alone() -> None:
    module: Any = build("llama")
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    Hf(architecture="llama", size="tiny").initialise(module.model.layers[1], root=module)
    changed = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all(name.startswith("model.layers.1.") for name in changed)
    assert not any(hasattr(p, "_is_hf_initialized") for p in module.parameters())


def test_a_rule_of_the_root_reaches_into_the_unit_and_no_further() -> None:
    from transformers import PreTrainedConfig, PreTrainedModel, initialization

    class Rooted(PreTrainedModel):
        config_class = PreTrainedConfig

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            super()._init_weights(module)
            if module is self:
                for layer in self.layers:
                    initialization.constant_(layer.weight, 7.0)

    module = Rooted(PreTrainedConfig())
    for layer in module.layers:
        nn.init.constant_(layer.weight, 1.0)  # type: ignore[arg-type]
    Hf(architecture="llama", size="tiny").initialise(module.layers[1], root=module)
    assert torch.equal(module.layers[1].weight, torch.full((3, 3), 7.0))  # type: ignore[arg-type]
    assert torch.equal(module.layers[0].weight, torch.full((3, 3), 1.0))  # type: ignore[arg-type]


def test_fresh_adapters_change_nothing_at_first() -> None:
    family = Hf(architecture="llama", size="tiny", lora={"r": 4})  # type: ignore[arg-type]
    values = fill(family, family.build(processor=None))
    adapters = {name: v for name, v in values.items() if "lora_" in name}
    assert adapters
    for name, value in adapters.items():
        assert torch.isfinite(value).all()
        assert (torch.count_nonzero(value) == 0) == ("lora_B" in name), name
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    theirs = get_peft_model(build("llama"), LoraConfig(r=4, target_modules="all-linear"))  # type: ignore[arg-type]
    expected = {n.removeprefix("base_model.model."): p for n, p in theirs.named_parameters() if "lora_A" in n}
    assert expected.keys() == {n for n in adapters if "lora_A" in n}
    for name, parameter in expected.items():
        assert float(adapters[name].std()) == pytest.approx(float(parameter.detach().std()), rel=0.15), name
