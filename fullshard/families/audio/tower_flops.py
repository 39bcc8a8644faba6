"""What the audio tower and the projector cost for each clip and each second of audio.

The tower runs once on the meta device, where torch counts every matrix product without computing one: on a clip and on
one twice as long, because some towers pad every clip to the same length and others do not. Must not know model names,
devices or ranks.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from fullshard.multimodal.towers import PROJECTOR

SECONDS = 2.0
"""The longer clip; attention makes long clips cost more than this tells, and the MFU is then too low."""
Cost = tuple[float, float]
"""Operations of a forward pass: for each clip, and for each second."""


def forward_costs(module: nn.Module, processor: Any) -> dict[str, Cost]:
    """The cost of the tower and of the projector; empty if the tower cannot be run without its model."""
    longest = SECONDS if processor.longest is None else min(SECONDS, processor.longest / processor.rate)
    try:
        short, whole = (_counted(module, processor, seconds=seconds) for seconds in (longest / 2, longest))
    except Exception:  # of any kind: the run does not depend on it
        return {}
    return {kind: _split(short[kind], whole[kind], seconds=longest) for kind in whole}


def training_costs(module: nn.Module, costs: dict[str, Cost]) -> dict[str, float]:
    """The cost in one training step, by quantity: forward 1, 1 more where a gradient passes through, and 1 more for the
    part that is trained."""
    model: Any = module
    found, passes = {"clips": 0.0, "audio_seconds": 0.0}, False
    for kind in ("audio", PROJECTOR):
        every = [p for name in model.towers.get(kind, ()) for p in _parameters(module, name)]
        trained = sum(p.numel() for p in every if p.requires_grad)
        passes |= trained > 0
        each = 1.0 + passes + trained / max(sum(p.numel() for p in every), 1)
        for quantity, cost in zip(found, costs.get(kind, (0.0, 0.0)), strict=True):
            found[quantity] += each * cost
    return {quantity: cost for quantity, cost in found.items() if cost}


def _parameters(module: nn.Module, name: str) -> list[nn.Parameter]:
    found = dict(module.named_modules()).get(name)
    return list(found.parameters()) if found is not None else [module.get_parameter(name)]


def _counted(module: nn.Module, processor: Any, *, seconds: float) -> dict[str, float]:
    """Operations for one clip of this length."""
    import numpy as np
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model: Any = module
    given = list(processor.features([np.zeros(int(seconds * processor.rate), dtype=np.float32)]).values())
    total, projector = 0.0, 0.0
    for name in model.towers["audio"]:
        tower = module.get_submodule(name)
        buffers = {key: torch.empty_like(buffer, device="meta") for key, buffer in tower.named_buffers()}
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            made = torch.func.functional_call(tower, buffers, _inputs(tower, given))
        total += counter.get_total_flops()
        projector += _projected(module, _vectors(made))
    return {"audio": total, PROJECTOR: projector}


def _inputs(tower: nn.Module, given: list[Any]) -> tuple[Any, ...]:
    """The features, and their mask if the tower asks for one."""
    import torch

    asked = inspect.signature(tower.forward).parameters.values()
    needed = [p for p in asked if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    features = given[0].to("meta")
    mask = next((each.to("meta") for each in given[1:] if each.dim() == 2), None)
    seen = torch.ones(features.shape[:2], dtype=torch.bool, device="meta") if mask is None else mask
    return (features, seen)[: len(needed)]


def _vectors(made: Any) -> Any:
    """The vectors that a tower gives."""
    return made if hasattr(made, "dim") else next(iter(made.values() if hasattr(made, "values") else made))


def _projected(module: nn.Module, made: Any) -> float:
    """The layers that project the tower's vectors; what is for other media has another width or is never reached."""
    model: Any = module
    weights = [
        parameter
        for holder in model.towers.get(PROJECTOR, ())
        for name, parameter in module.named_parameters()
        if name.startswith(f"{holder}.") and parameter.dim() == 2 and name not in model.never_heard
    ]
    rows = made.numel() / weights[0].shape[1] if weights else 0.0
    return 2.0 * rows * sum(weight.numel() for weight in weights)


def _split(short: float, whole: float, *, seconds: float) -> Cost:
    """What each clip and each second cost, so that both lengths come out."""
    second = (whole - short) / (seconds / 2)
    clip = whole - second * seconds
    return (clip, second) if clip >= 0 else (0.0, whole / seconds)


__all__ = ["forward_costs", "training_costs"]
