"""The language-model objective's own paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from fullshard.families.language.objectives.causal_lm import CausalLM
from fullshard.hf.architecture.head import bind


@pytest.mark.parametrize("full_logits", [False, True])
def test_document_bounds_reach_the_attention_on_both_paths(full_logits: bool) -> None:
    """A kernel that keeps packed documents apart by their bounds cannot do without them."""
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    module: Any = AutoModelForCausalLM.from_config(config)
    bind(module)
    module.takes_bounds = True
    seen: list[Any] = []
    attention = module.model.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs.get("cu_seq_lens_q")), with_kwargs=True
    )
    ids = torch.arange(8)[None]
    bounds = torch.tensor([0, 4, 8], dtype=torch.int32)
    batch = {"input_ids": ids, "position_ids": torch.arange(4).repeat(2)[None], "labels": ids, "bounds": bounds}
    CausalLM(full_logits=full_logits).loss(module, batch, {})
    assert len(seen) == 1
    assert seen[0] is bounds
