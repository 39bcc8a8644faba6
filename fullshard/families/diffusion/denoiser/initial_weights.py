"""Initial weights of a denoiser: each layer's own, and zeros where a diffusion transformer starts as the identity.

Must not know ranks, files or losses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.hf.adapters.edits import ADAPTER


@torch.no_grad()
def initialise(unit: nn.Module) -> None:
    """Initialises the parameters under `unit`, except those on meta, which belong to another unit."""
    for part in unit.modules():
        own = list(part.parameters(recurse=False))
        if own and not any(p.is_meta for p in own):
            _layer(part)
    for part in unit.modules():
        for layer in _zero_layers(part):
            for parameter in layer.parameters():
                if not parameter.is_meta:
                    parameter.zero_()
        _adapters(part)


def _zero_layers(part: nn.Module) -> list[nn.Module]:
    """The linear layer of an adaptive norm, so that a block starts as the identity, and the last projection."""
    kind = type(part).__name__
    # PixArt has one for all blocks, and each block adds its own table: nothing is zero there.
    names = ["linear"] if "AdaLayerNorm" in kind and kind != "AdaLayerNormSingle" else []
    if hasattr(part, "transformer_blocks"):
        names += ["proj_out", "proj_out_1", "proj_out_2"]
    layers = (getattr(part, name, None) for name in names)
    plain = (getattr(layer, "base_layer", layer) for layer in layers)
    return [layer for layer in plain if isinstance(layer, nn.Linear)]


def _layer(part: Any) -> None:
    if hasattr(part, "set_first_values"):
        part.set_first_values()
    elif isinstance(part, nn.Embedding):
        # Labels: N(0, 1), not N(0, 0.02) as in the DiT paper. Next to the time embedding, small rows have little effect
        # and classes are learned late: benchmarks/dit_init.py.
        nn.init.normal_(part.weight)
    elif isinstance(part, nn.Linear):
        nn.init.xavier_uniform_(part.weight)
        if part.bias is not None:
            nn.init.zeros_(part.bias)
    elif hasattr(part, "reset_parameters"):
        part.reset_parameters()
    else:  # a parameter outside any layer, such as a scale
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.constant_(parameter, 0.0 if name == "bias" else 1.0)


def _adapters(part: Any) -> None:
    """Adapters start as the identity."""
    if hasattr(part, "reset_lora_parameters"):
        own = [p for name, p in part.named_parameters() if name.startswith("lora_")]
        if own and not any(p.is_meta for p in own):
            part.reset_lora_parameters(ADAPTER, init_lora_weights=True)
