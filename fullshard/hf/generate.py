"""Continues rows of tokens with Transformers' own `generate` and its KV cache.

Works on sharded modules: every rank calls it with the same number of rows, and continues until all ranks are done.
Must not know prompts, texts or recipes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.contracts.model import Continuation


@torch.no_grad()
def continue_rows(
    module: nn.Module,
    rows: Sequence[Sequence[int]],
    way: Continuation,
    *,
    source: Path | None,
    device: torch.device,
    in_step: bool,
    media: Mapping[str, torch.Tensor],
) -> list[list[int]]:
    """The new tokens of each row, including the stop token if there was one. `media`: what else the model takes."""
    model: Any = module
    settings = generation_settings(model, way, source=source)
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), settings.pad_token_id, device=device)
    real = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, width - len(row) :] = torch.tensor(row, device=device)
        real[at, width - len(row) :] = 1
    if way.temperature:
        torch.manual_seed(way.seed)
    # Transformers would run towers before the forward pass, which gathers their weights.
    model._supports_mm_encoder_outputs = lambda: False
    inputs = {"attention_mask": real, **{name: value.to(device) for name, value in media.items()}}
    given = model.generate(ids, **inputs, generation_config=settings, synced_gpus=in_step)
    return [up_to_the_end(row, way.ends) for row in given[:, width:].tolist()]


def stop_tokens(model: Any, source: Path | None) -> set[int]:
    """The stop tokens of the model."""
    found = _stored(model, source).eos_token_id
    return set(found if isinstance(found, list) else [] if found is None else [found])


def _stored(model: Any, source: Path | None) -> Any:
    """The generation settings beside the weights, or those that follow from the model's config."""
    from transformers import GenerationConfig

    if source is not None and (source / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(source)
    return GenerationConfig.from_model_config(model.config)


def generation_settings(model: Any, way: Continuation, *, source: Path | None) -> Any:
    """The stored settings with the requested ones; greedy unless there is a temperature."""
    found = copy.deepcopy(_stored(model, None if way.plain else source))
    ends = sorted(way.ends)
    changed: dict[str, Any] = {
        "max_new_tokens": way.tokens,
        "max_length": None,
        "eos_token_id": ends or None,
        "pad_token_id": found.pad_token_id if found.pad_token_id is not None else (ends or [0])[0],
        "do_sample": way.temperature > 0,
        "temperature": way.temperature or None,
        "top_p": way.top_p if way.temperature else None,
        "top_k": 0 if way.temperature else None,
        "num_beams": 1,
        "num_return_sequences": 1,
        "use_cache": True,
        "return_dict_in_generate": False,
    }
    for name, value in changed.items():
        setattr(found, name, value)
    return found


def up_to_the_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """Without the padding after the end of a row."""
    stop = next((at for at, token in enumerate(tokens, start=1) if token in ends), len(tokens))
    return tokens[:stop]
