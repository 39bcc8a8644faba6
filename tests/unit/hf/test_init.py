"""Fresh values one unit at a time equal Transformers' own initialisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullshard.dist.wrap import find_blocks, unit_parameters
from fullshard.models.hf import Hf
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
    plain = dict(build(architecture, pad_token_id=5).named_parameters())
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


def test_what_lies_outside_the_unit_is_left_alone() -> None:
    module: Any = build("llama")
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    Hf(architecture="llama", size="tiny").initialise(module.model.layers[1], root=module)
    changed = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all(name.startswith("model.layers.1.") for name in changed)
    assert not any(hasattr(p, "_is_hf_initialized") for p in module.parameters())


def test_fresh_adapters_change_nothing_at_first() -> None:
    family = Hf(architecture="llama", size="tiny", lora={"r": 4})  # type: ignore[arg-type]
    values = fill(family, family.build(processor=None))
    adapters = {name: v for name, v in values.items() if "lora_" in name}
    assert adapters
    for name, value in adapters.items():
        assert torch.isfinite(value).all()
        assert (torch.count_nonzero(value) == 0) == ("lora_B" in name), name
    from peft.tuners.lora import Linear

    torch.manual_seed(0)
    plain = Linear(nn.Linear(128, 128), "default", r=4)
    expected = plain.lora_A["default"].weight.std()
    found = torch.cat([v.flatten() for n, v in adapters.items() if n.endswith("q_proj.lora_A.default.weight")]).std()
    assert float(found) == pytest.approx(float(expected), rel=0.1)
