"""Checks that a tokenizer is the one that stored weights were trained with.

Tokens may have been added at the end. Must not know models, data or ranks.
"""

from __future__ import annotations

import logging
from typing import Any

from fullshard.errors import RecipeError

logger = logging.getLogger(__name__)

SAMPLES = (
    "The quick brown fox jumps over the lazy dog, doesn't it?",
    "def mean(values):\n    return sum(values) / len(values)  # 3.14\n",
    "Grüße, señor! Привет, мир. 你好，世界。こんにちは 안녕 नमस्ते مرحبا שלום 🙂",
)
MOST_SPARE = 0.1
"""The share of embedding rows that may be unused (padding to a round number); more means another tokenizer."""

_ADVICE = (
    "Leave model.tokenizer out to use the model's own; to train the model with this one anyway, set "
    "model.resize_embedding: true."
)


def check_tokenizer(tokenizer: Any, own: Any, *, rows: int | None, agreed: bool) -> None:
    """Raises RecipeError unless a tokenizer is the model's `own`, or `agreed`. `own` is None if no tokenizer is
    stored with the weights; `rows` (of the stored embedding) is None if unknown."""
    tokenizer, own = getattr(tokenizer, "tokenizer", tokenizer), getattr(own, "tokenizer", own)
    found = difference(tokenizer, own) if own is not None else _size(tokenizer, rows=rows)
    if found is None:
        if own is None:
            logger.warning(
                "model.tokenizer cannot be compared: no tokenizer is stored with the weights; it has %d tokens%s",
                *(len(tokenizer), "" if rows is None else f", and the embedding {rows} rows"),
            )
        elif tokenizer.eos_token != own.eos_token:
            logger.warning(
                "model.tokenizer ends a text with %s, and the model's own tokenizer with %s",
                *(tokenizer.eos_token, own.eos_token),
            )
        return
    if not agreed:
        raise RecipeError(f"model.tokenizer is not the tokenizer of these weights: {found}. {_ADVICE}")
    logger.warning(
        "model.tokenizer is not the tokenizer of these weights (%s), as model.resize_embedding allows: its tokens "
        "start with the embeddings of other tokens",
        found,
    )


def difference(tokenizer: Any, own: Any) -> str | None:
    """How a tokenizer differs from the model's own; None if only tokens at the end were added."""
    theirs, ours = tokenizer.get_vocab(), own.get_vocab()
    special = {token.content: id_ for id_, token in own.added_tokens_decoder.items()}
    for token, id_ in {**special, **ours}.items():
        if theirs.get(token) != id_:
            there = f"has the id {theirs[token]:,}" if token in theirs else "is missing"
            return (
                f"it has {len(tokenizer):,} tokens and the model's own {len(own):,}; {token!r}, there {id_:,}, {there}"
            )
    for text in SAMPLES:
        one, other = (each(text, add_special_tokens=False)["input_ids"] for each in (tokenizer, own))
        if one != other:
            at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
            return (
                f"it encodes {text[:24]!r} ... as {one[at : at + 4]} where the model's own gives {other[at : at + 4]}"
            )
    return None


def _size(tokenizer: Any, *, rows: int | None) -> str | None:
    tokens = len(tokenizer)
    if rows is None or (1 - MOST_SPARE) * rows <= tokens <= rows:
        return None
    return f"it has {tokens:,} tokens and the embedding {rows:,} rows (no tokenizer is stored with the weights)"
