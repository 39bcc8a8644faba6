"""Small real models of the architectures that every rule here is tried on."""

from __future__ import annotations

from typing import Any

from torch import nn

CAUSAL = {
    "llama": 2,
    "phi": 2,
    "phi3": 2,
    "qwen2": 2,
    "qwen3": 2,
    "gemma": 2,
    "gemma2": 2,
    "gemma3_text": 2,
    "mistral": 2,
    "gpt2": 2,
    "gpt_neox": 2,
    "opt": 2,
    "cohere": 2,
    "granite": 2,
    "qwen3_moe": 2,
}
"""Causal language models and their number of layers in size tiny."""

TIED = {"gemma", "gemma2", "gemma3_text", "gpt2", "opt", "cohere"}
"""Those whose own config ties embedding and head."""


def build(architecture: str, **overrides: Any) -> nn.Module:
    """A real model in size tiny with fixed weights, by Transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM

    from fullshard.hf.architecture.sizes import make_config

    with torch.random.fork_rng():
        torch.manual_seed(3)
        model: nn.Module = AutoModelForCausalLM.from_config(make_config(architecture, "tiny", overrides)).eval()
    return model


def towers(architecture: str) -> nn.Module:
    """A small model with a tower of its own for text and for images (3 and 2 layers), or BERT (3 layers)."""
    from transformers import BertConfig, BertModel, CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    if architecture == "bert":
        return BertModel(BertConfig(**shape, num_hidden_layers=3, vocab_size=99))
    text = {**shape, "num_hidden_layers": 3, "vocab_size": 99, "max_position_embeddings": 16}
    vision = {**shape, "num_hidden_layers": 2, "image_size": 16, "patch_size": 8}
    if architecture == "clip":
        return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    return SiglipModel(SiglipConfig(text_config=text, vision_config=vision))
