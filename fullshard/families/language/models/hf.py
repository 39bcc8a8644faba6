"""Causal language models of Transformers. Must not know objectives, ranks or sharding."""

from __future__ import annotations

from typing import Any, ClassVar

from fullshard.hf.transformers_model import TransformersModel


class Hf(TransformersModel):
    """A causal language model of Transformers."""

    loader: ClassVar[str | None] = "transformers.AutoModelForCausalLM.from_pretrained"
    adapter_loader: ClassVar[str | None] = "peft.AutoPeftModelForCausalLM.from_pretrained"
    forward_methods: ClassVar[tuple[str, ...]] = ("hidden_states_and_head",)
    usual: ClassVar[dict[str, Any] | None] = {"objective": {"kind": "causal_lm"}, "evaluate": {"parts": ["loss"]}}


__all__ = ["Hf"]
