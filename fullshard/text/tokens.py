"""Token samples and their micro-batches, for all encoders that make tokens.

`labels[i]` is the target of position i. Must not know record formats, files or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fullshard.contracts.data import IGNORE, Features
from fullshard.errors import DataError, RecipeError
from fullshard.formatting.plural import counted


def inner_tokenizer(processor: Any) -> Any:
    """The tokenizer inside a processor, or the tokenizer itself; None for None."""
    return getattr(processor, "tokenizer", processor)


def tokenizer_of(processor: Any, *, needed_by: str) -> Any:
    """The same; raises RecipeError without one."""
    tokenizer = inner_tokenizer(processor)
    if tokenizer is None:
        raise RecipeError(
            f"model.tokenizer: the data is {needed_by}, which needs a tokenizer, but the model has none. Train one "
            "on the data with model.tokenizer={train: {vocab_size: 8192}}, or name a folder or a model of the Hugging "
            "Face hub that has one."
        )
    return tokenizer


def shifted(ids: np.ndarray, learned: np.ndarray | None = None) -> np.ndarray:
    """Labels of a sequence: the next token where that token is to be learned, else IGNORE, as for the last position."""
    labels = np.full(len(ids), IGNORE, dtype=np.int32)
    labels[:-1] = ids[1:] if learned is None else np.where(learned[1:], ids[1:], IGNORE)
    return labels


def sample(ids: np.ndarray, labels: np.ndarray) -> Features:
    """The features of one token sequence."""
    return {"input_ids": ids.astype(np.int32, copy=False), "labels": labels.astype(np.int32, copy=False)}


def collate_tokens(samples: Sequence[Features], *, length: int | None) -> dict[str, Any]:
    """`input_ids`, `labels` and `position_ids`, padded on the right, and `bounds`, where documents begin and end.

    Positions go on counting through the padding. Transformers takes every break in the count for a new document, so a
    row with one document stays a plain causal row, and no position exceeds the row. Padding comes last and attention
    is causal, so no real token sees it.
    """
    import torch

    from fullshard.text.document_bounds import document_bounds

    longest = max(len(entry["input_ids"]) for entry in samples)
    width = longest if length is None else length
    if longest > width:
        raise DataError(f"a sample has {counted(longest, 'token')}, but rows have {width}. Raise data.sequence_length.")
    ids = np.zeros((len(samples), width), dtype=np.int64)
    labels = np.full((len(samples), width), IGNORE, dtype=np.int64)
    positions = np.empty((len(samples), width), dtype=np.int64)
    for row, entry in enumerate(samples):
        size = len(entry["input_ids"])
        ids[row, :size] = entry["input_ids"]
        labels[row, :size] = entry["labels"]
        positions[row, :size] = entry.get("position_ids", np.arange(size))
        positions[row, size:] = positions[row, size - 1] + 1 + np.arange(width - size)
    return {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(positions),
        "bounds": document_bounds(torch.from_numpy(positions)),
    }
