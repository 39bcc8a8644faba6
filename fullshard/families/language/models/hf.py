"""Causal language models of Transformers. Must not know objectives, ranks or sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from fullshard.hf.transformers_model import TransformersModel
from fullshard.multimodal.processor import has_processor


class Hf(TransformersModel):
    """A causal language model of Transformers."""

    loader: ClassVar[str | None] = "transformers.AutoModelForCausalLM.from_pretrained"
    adapter_loader: ClassVar[str | None] = "peft.AutoPeftModelForCausalLM.from_pretrained"
    forward_methods: ClassVar[tuple[str, ...]] = ("hidden_states_and_head",)
    usual: ClassVar[dict[str, Any] | None] = {"objective": {"kind": "causal_lm"}, "evaluate": {"parts": ["loss"]}}

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        return super().recognises(folder) and not has_processor(folder)


__all__ = ["Hf"]
