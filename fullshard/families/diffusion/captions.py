"""Captions of images: found in records, stored as states or tokens, and collated.

Must not know images, files, text encoders or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fullshard.config.problems import found
from fullshard.contracts.data import Features, Record
from fullshard.data.records import MAPPING, keys_found
from fullshard.errors import DataError, RecipeError
from fullshard.images.reading import is_empty

if TYPE_CHECKING:
    from fullshard.families.diffusion.text.encoder_stack import TextStack

COLUMNS = ("text", "caption", "prompt")
"""Columns of a text; the first that holds something is read."""


def column_of(record: Record, mapped: str | None) -> str | None:
    """The column that holds the text."""
    accepted = (mapped,) if mapped else COLUMNS
    return next((name for name in accepted if not is_empty(record.get(name))), None)


def caption(record: Record, mapped: str | None) -> str:
    """The text of a record."""
    column = column_of(record, mapped)
    value = record[column] if column is not None else None
    if isinstance(value, str) and value.strip():
        return value
    accepted = f"Accepted for it: {', '.join((mapped,) if mapped else COLUMNS)}."
    if value is not None and not isinstance(value, str):
        raise DataError(
            f"{column!r} must be a text, found {found(value)}. Give it one, or take another "
            f"column with {MAPPING} = {{text: COLUMN}}."
        )
    raise DataError(
        f"no text in the record, or a blank one, but data.encode.text asks for one. {keys_found(record)} {accepted} "
        f"Give it one, remove the record, or name another column with {MAPPING} = {{text: COLUMN}}."
    )


def check_model(stack: TextStack | None, module: Any) -> None:
    """Raises if a denoiser takes no texts, or would take padding for text. A user's own model is not checked."""
    if stack is None or not hasattr(module, "text_width"):
        return
    name = getattr(module, "class_name", type(module).__name__)
    if module.text_width is None:
        raise RecipeError(
            f"data.encode.text gives texts, but {name} takes no texts. Leave data.encode.text out, or choose a model "
            "that is conditioned on texts: model.architecture sd3, flux, pixart or unet_text."
        )
    if getattr(module, "takes_mask", True):
        return
    for number, text in enumerate(stack.texts):
        if not text.is_padded:
            key = "data.encode.text" + (f"[{number}]" if len(stack.texts) > 1 else "")
            how = "padded = false" if text.padded is False else "padded = false, the usual for one encoder but CLIP"
            raise RecipeError(
                f"{key}: {how}, masks the padding of short texts, but {name} takes no mask, as in "
                f"its pipeline. Set {key}.padded = true."
            )


def features_of(written: Sequence[str], stack: TextStack) -> list[tuple[Features, bool]]:
    """What a sample keeps of its text (tokens if encoders are live, else states), and whether the text was cut."""
    if stack.is_live:
        found = stack.tokens(written)
        return [({"text_tokens": ids[None]}, bool(cut)) for ids, cut in zip(found.ids, found.is_cut, strict=True)]
    features: list[tuple[Features, bool]] = []
    for state in stack.states(written):
        pooled = {} if state.pooled is None else {"text_pooled": state.pooled[None]}
        features.append(({"text_states": state.states, **pooled}, bool(state.is_cut)))
    return features


def empty_features(stack: TextStack) -> Features:
    """The features of the empty text, once for all samples: tokens if encoders are live (none for zeros), else
    states."""
    if stack.is_live:
        tokens = stack.empty_tokens()
        return {} if tokens is None else {"empty_tokens": tokens}
    state = stack.empty_state()
    return {"empty_states": state.states, **({} if state.pooled is None else {"empty_pooled": state.pooled[None]})}


def collate_empty(empty: Features, *, length: int) -> dict[str, Any]:
    """`empty_tokens`; or `empty_states`, `empty_mask` and `empty_pooled`, like those of texts, with one row."""
    import torch

    if "empty_states" not in empty:
        return {name: torch.from_numpy(part) for name, part in empty.items()}
    found = collate([{name.replace("empty", "text"): part for name, part in empty.items()}], length=length)
    return {name.replace("text", "empty"): part for name, part in found.items()}


def collate(samples: Sequence[Features], *, length: int) -> dict[str, Any]:
    """`text_tokens` int64 (B, tokens of all encoders); or `text_states` fp32 (B, T, D), `text_mask` bool (B, T) and,
    if it is stored, `text_pooled` fp32 (B, P); nothing without texts. T is always `length`: the output of a model
    without masks must not depend on the other texts in the batch."""
    import torch

    if "text_tokens" in samples[0]:
        return {"text_tokens": torch.from_numpy(np.concatenate([sample["text_tokens"] for sample in samples]))}
    if "text_states" not in samples[0]:
        return {}
    states = np.zeros((len(samples), length, samples[0]["text_states"].shape[1]), dtype=np.float32)
    mask = np.zeros(states.shape[:2], dtype=bool)
    for row, sample in enumerate(samples):
        size = len(sample["text_states"])
        states[row, :size], mask[row, :size] = sample["text_states"], True
    found = {"text_states": torch.from_numpy(states), "text_mask": torch.from_numpy(mask)}
    if "text_pooled" in samples[0]:
        found["text_pooled"] = torch.from_numpy(np.concatenate([sample["text_pooled"] for sample in samples]))
    return found
