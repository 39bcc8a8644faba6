"""Tiny frozen parts of pipelines with fixed random weights: a VAE, text encoders with tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = ("a", "small", "round", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PAD, BEGIN, UNKNOWN, END = range(4)


def vae_folder(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """An AutoencoderKL that makes one pixel of 2 x 2."""
    import torch
    from diffusers import AutoencoderKL

    settings: dict[str, Any] = {
        "in_channels": 1,
        "out_channels": 1,
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "block_out_channels": [4, 8],
        "norm_num_groups": 2,
        "latent_channels": 2,
        "sample_size": 8,
        "scaling_factor": 2.5,
        "shift_factor": 0.125,
    }
    torch.manual_seed(seed)
    AutoencoderKL(**settings | changes).save_pretrained(folder)
    return folder


def tokenizer_folder(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = {name: number for number, name in enumerate(("<pad>", "<s>", "<unk>", "</s>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BEGIN), ("</s>", END)]
    )
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def clip_folder(
    folder: Path, *, tokenizer: Path | None = None, seed: int = 0, layers: int = 1, projected: int | None = None
) -> Path:
    """States and pooled vectors of 12, or projected to other vectors, at most 10 tokens; the tokenizer beside it, or
    where `tokenizer` says."""
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(seed)
    shape = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": layers, "num_attention_heads": 2}
    tokens = {"vocab_size": 4 + len(WORDS), "pad_token_id": PAD, "bos_token_id": BEGIN, "eos_token_id": END}
    kind = CLIPTextModel if projected is None else CLIPTextModelWithProjection
    config = CLIPTextConfig(**shape, **tokens, max_position_embeddings=10, projection_dim=projected or 12)
    kind(config).save_pretrained(folder)
    tokenizer_folder(tokenizer or folder)
    return folder


def t5_folder(folder: Path, *, width: int = 8) -> Path:
    """States of 8, or of another width."""
    import torch
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    shape = {"d_model": width, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    tokens = {"vocab_size": 4 + len(WORDS), "pad_token_id": PAD, "eos_token_id": END}
    T5EncoderModel(T5Config(**shape, **tokens)).save_pretrained(folder)
    return tokenizer_folder(folder)
