"""Embeddings from a Transformers model: backbone, pooling to one vector per text, then Dense layers if there are any.

`bind` gives a module the method `embed`. Rows hold one text or several; either way a text attends only to itself.
Must not know losses, files or ranks.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.errors import RecipeError
from fullshard.families.embedding.batching.chunks import Images
from fullshard.families.embedding.embedder.dense import AfterPooling
from fullshard.families.embedding.embedder.sentence_folder import AFTER_POOLING, Layer, check_widths
from fullshard.hf.scalars import NAME as SCALARS


@dataclass(frozen=True)
class EmbedRule:
    """How one model makes embeddings."""

    pooling: str
    normalize: bool
    causal: bool
    takes_positions: bool
    position_offset: int
    """The first position; in the RoBERTa family it comes after the padding index."""
    window: int | None
    """How far a token sees to either side in sliding-window layers; None without such layers."""
    images: Images | None
    """None for a text-only model."""


def bind(module: nn.Module, *, pooling: str, normalize: bool, dense: Sequence[Layer] = ()) -> EmbedRule:
    """Gives the module its method `embed`, its Dense layers and `embedding_width`; freezes the unused pooler."""
    bound: Any = module
    check_widths(dense, width_of(module))
    bound.embedding_width = dense[-1].outputs if dense else width_of(module)
    if dense:
        setattr(bound, AFTER_POOLING, AfterPooling(dense))
    takes = "position_ids" in inspect.signature(bound.forward).parameters
    window, images = _window(module), images_of(bound.config)
    rule = EmbedRule(pooling, normalize, is_causal(module), takes, position_offset(module), window, images)
    bound.embed_rule = rule
    bound.embed = types.MethodType(embed, module)
    for name, parameter in module.named_parameters():
        if name.startswith("pooler."):
            parameter.requires_grad_(False)
    return rule


def width_of(module: nn.Module) -> int:
    """The hidden size of the backbone."""
    model: Any = module
    return int(model.config.get_text_config(decoder=True).hidden_size)


def is_causal(module: nn.Module) -> bool:
    """Whether tokens attend only to earlier tokens."""
    return any(getattr(part, "is_causal", False) is True for part in module.modules())


def position_offset(module: nn.Module) -> int:
    """The model's number of the first position."""
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding) and part.padding_idx is not None:
            return part.padding_idx + 1
    return 0


def images_of(config: Any) -> Images | None:
    """How a model of the Qwen2-VL kind takes images; None for any other."""
    vision, token = getattr(config, "vision_config", None), getattr(config, "image_token_id", None)
    merge = getattr(vision, "spatial_merge_size", None)
    if vision is None or token is None or merge is None:
        return None
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    return Images(token, merge, channels * vision.temporal_patch_size * vision.patch_size**2)


def _window(module: nn.Module) -> int | None:
    parts = [part for part in module.modules() if getattr(part, "is_causal", None) is False]
    windows = [window for part in parts if isinstance(window := getattr(part, "sliding_window", None), int)]
    return windows[0] - 1 if windows else None


def embed(
    module: Any,
    *,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    real: torch.Tensor,
    places: torch.Tensor,
    lengths: torch.Tensor,
    bounds: torch.Tensor,
    packed: bool,
    pixels: torch.Tensor | None = None,
    grids: torch.Tensor | None = None,
    tokens: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(texts, width) in fp32, or (all tokens, width) with `tokens`; and the objective's learned scalars.

    `positions`, `real`: of each position in the rows; `places`, `lengths`: see Layout. `bounds` are the cumulative
    lengths of texts and padding, for varlen attention. `pixels`, `grids`: patches of all images, row by row."""
    rule: EmbedRule = module.embed_rule
    inputs: dict[str, Any] = {"input_ids": input_ids}
    if getattr(module, "takes_bounds", False):
        inputs["cu_seq_lens_q"] = bounds
    elif not packed:
        inputs["attention_mask"] = real.long()
    elif not rule.causal:
        inputs["attention_mask"] = _same_text(positions, rule.window)
    if packed and rule.takes_positions:
        inputs["position_ids"] = positions + rule.position_offset
        if rule.images is not None:  # the position among the tokens, and three axes of an image
            inputs["position_ids"] = inputs["position_ids"].expand(4, -1, -1)
    if pixels is not None and rule.images is not None:
        inputs |= {"pixel_values": pixels, "image_grid_thw": grids}
        inputs["mm_token_type_ids"] = (input_ids == rule.images.token).int()
    hidden = module.forward(**inputs).last_hidden_state
    chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, places).float()
    vectors = chosen if tokens else _pool(chosen, lengths, rule.pooling)
    if (dense := getattr(module, AFTER_POOLING, None)) is not None:
        if tokens:
            raise RecipeError(
                "objective.loss: tokens are compared before pooling, and the model's Dense modules come after it, so "
                "they would not be trained. Use another loss, or remove them from modules.json in a copy."
            )
        vectors = dense(vectors)
    if rule.normalize or tokens:
        vectors = F.normalize(vectors, dim=-1)
    scalars = getattr(module, SCALARS, None)
    return vectors, scalars() if scalars is not None else None


def _same_text(positions: torch.Tensor, window: int | None) -> torch.Tensor | dict[str, torch.Tensor]:
    """(rows, 1, length, length): which positions are of one text; one mask per layer type if some have a window."""
    text = (positions == 0).cumsum(-1)
    same = (text[:, :, None] == text[:, None, :])[:, None]
    if window is None:
        return same
    near = (positions[:, :, None] - positions[:, None, :]).abs() <= window
    return {"full_attention": same, "sliding_attention": same & near[:, None]}


def _pool(vectors: torch.Tensor, lengths: torch.Tensor, pooling: str) -> torch.Tensor:
    if pooling == "mean":
        # unsafe: checking the lengths would make the host wait for the device.
        return torch.segment_reduce(vectors, "mean", lengths=lengths, unsafe=True)
    ends = lengths.cumsum(0)
    return vectors[ends - 1] if pooling == "last" else vectors[ends - lengths]
