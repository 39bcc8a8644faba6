"""The config of a model on disk, and the size of its vocabulary.

Must not know named sizes, modules, weights or ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.errors import RecipeError
from fullshard.hf.architecture.sizes import check_overrides

logger = logging.getLogger(__name__)


def load_config(folder: Path, *, trust_remote_code: bool, overrides: Mapping[str, Any]) -> Any:
    """The config beside the weights, with the overrides on top."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _unreadable(folder, error) from error
    check_overrides(overrides, config, what=f"the config in {folder}")
    for key, value in overrides.items():
        setattr(config, key, value)
    return config


def fit_vocabulary(config: Any, processor: Any, *, resize: bool | None, exact: bool, stored: bool = True) -> int:
    """Grows the embedding when the tokenizer needs more rows, or fits it exactly; returns how many rows are new."""
    text = _text_part(config)
    tokens, rows = len(getattr(processor, "tokenizer", processor)), int(text.vocab_size)
    if tokens > rows and resize is False:
        raise RecipeError(
            f"model.resize_embedding = false: the tokenizer has {tokens} tokens and the model {rows} rows. "
            "Leave model.resize_embedding out to grow the model, or use the model's own tokenizer."
        )
    if resize is False or not (tokens > rows or (exact and tokens != rows)):
        return 0
    text.vocab_size = tokens
    if stored:
        # A warning, so that it is seen: resizing rows changes what the model has learned.
        logger.warning("the embedding is resized from %d to %d rows, one for each token", rows, tokens)
    return max(tokens - rows, 0)


def take_special_tokens(config: Any, processor: Any) -> None:
    """The tokenizer's special tokens, for a model from scratch."""
    text = _text_part(config)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if (value := getattr(getattr(processor, "tokenizer", processor), name, None)) is not None:
            setattr(text, name, value)


def _text_part(config: Any) -> Any:
    """Where the vocabulary is set; of an encoder-decoder Transformers would give a copy."""
    return config if config.is_encoder_decoder else config.get_text_config(decoder=True)


def _unreadable(folder: Path, error: Exception) -> RecipeError:
    text = str(error)
    if "trust_remote_code" in text:
        return RecipeError(
            f"model.path: the model in {folder} needs its own Python code. Read that code, then set "
            "model.trust_remote_code: true."
        )
    reason = (text.strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return RecipeError(
        f"model.path: {folder} holds no config.json that Transformers can read ({reason}). "
        "Give a folder written by save_pretrained, or a hub name."
    )
