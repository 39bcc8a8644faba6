"""Hidden states and head give the model's own logits; packed documents stay apart, or the proof says they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullshard.hf.architecture.head import Head, bind
from tests.unit.hf.architectures import CAUSAL, build

IDS = torch.arange(24).mul(5).remainder(89).add(3).reshape(2, 12)
LEAKING = {"opt"}
"""Architectures whose attention does not see that positions restart."""


def logits(hidden: torch.Tensor, head: Head | None) -> torch.Tensor:
    return hidden if head is None else head.logits(hidden)


@torch.no_grad()
@pytest.mark.parametrize("architecture", sorted(CAUSAL))
def test_head_gives_the_models_own_logits(architecture: str) -> None:
    overrides: dict[str, Any] = {"granite": {"logits_scaling": 4.0}, "cohere": {"logit_scale": 0.3}}.get(
        architecture, {}
    )
    module: Any = build(architecture, **overrides)
    rule = bind(module)
    assert not rule.whole, rule.reason
    module.get_output_embeddings().weight.mul_(30)
    own = module(input_ids=IDS).logits
    found = module.hidden_states_and_head(logits, input_ids=IDS)
    assert float((own - found).abs().max() / own.abs().max()) < 1e-6


def test_scale_and_softcap_come_from_the_config() -> None:
    assert bind(build("granite", logits_scaling=4.0)).scale == 0.25
    assert bind(build("cohere", logit_scale=0.3)).scale == 0.3
    assert bind(build("gemma2", final_logit_softcapping=17.0)).softcap == 17.0
    assert bind(build("llama")).softcap is None


@torch.no_grad()
def test_a_head_of_several_layers_gives_whole_logits() -> None:
    module: Any = build("bert", is_decoder=True)
    rule = bind(module)
    assert rule.whole
    own = module(input_ids=IDS).logits
    assert torch.equal(module.hidden_states_and_head(lambda h, head: (h, head)[head is not None], input_ids=IDS), own)


@torch.no_grad()
def test_full_logits_on_demand() -> None:
    module: Any = build("llama")
    bind(module)
    given = module.hidden_states_and_head(lambda h, head: (h, head), input_ids=IDS, full_logits=True)
    assert given[1] is None
    assert torch.equal(given[0], module(input_ids=IDS).logits)


@torch.no_grad()
def test_an_adapted_head_gives_whole_logits() -> None:
    from fullshard.hf.adapters.edits import add_lora

    module: Any = build("llama")
    bind(module)
    add_lora(module, r=2, alpha=4, dropout=0.0, targets=["lm_head"], base=None)
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        parameter.fill_(0.01)
    hidden, head = module.hidden_states_and_head(lambda h, head: (h, head), input_ids=IDS)
    assert head is None
    assert hidden.shape[-1] == module.config.vocab_size


@torch.no_grad()
@pytest.mark.parametrize("architecture", sorted(CAUSAL))
def test_packed_documents_stay_apart(architecture: str) -> None:
    module: Any = build(architecture)
    positions = torch.arange(6).repeat(2)[None]
    other = IDS[:1].clone()
    other[:, :6] += 7
    bind(module)
    first, second = (
        module.hidden_states_and_head(logits, input_ids=ids, position_ids=positions)[:, 6:] for ids in (IDS[:1], other)
    )
    apart = float((first - second).abs().max())
    assert (apart < 1e-5) == (architecture not in LEAKING)


@torch.no_grad()
def test_a_recurrent_model_does_not_keep_documents_apart() -> None:
    module: Any = build("mamba")
    other = IDS[:1].clone()
    other[:, :6] += 7
    first, second = (module(input_ids=ids).logits[:, 6:] for ids in (IDS[:1], other))
    assert float((first - second).abs().max()) > 1e-5


def test_the_probe_leaves_the_random_state_alone() -> None:
    module = build("llama")
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    bind(module)
    assert torch.equal(torch.rand(3), expected)
