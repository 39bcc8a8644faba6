"""torch's own fused updates clip the gradients themselves; any other optimizer gets clipped gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fullshard.dist import gradients
from tests.dist.sharded_model import spread, tokens
from tests.ranks import RankPool


class Foreign(torch.optim.AdamW):
    """Says that it takes a scale, as GradScaler understands it, and takes it another way."""

    _step_supports_amp_scaling = True


def clipped(kind: str) -> tuple[float, float, bool]:
    """The norm before, the norm that the optimizer finds in its gradients, and whether it is to divide."""
    module, _, _ = spread({"architecture": "qwen3", "size": "tiny"}, torch.float32)
    parameters: list[nn.Parameter] = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True) if kind == "fused" else Foreign(parameters)
    module(input_ids=tokens(64)).logits.square().sum().backward()
    norm = gradients.clip_global_norm(optimizer, ceiling=0.5, scaled=False)
    left = torch.cat([p.grad.full_tensor().flatten() for p in parameters]).norm()
    return norm.item(), left.item(), getattr(optimizer, "grad_scale", None) is not None


@pytest.mark.parametrize("kind", ["fused", "foreign"])
def test_only_torchs_fused_optimizers_clip_themselves(ranks: RankPool, kind: str) -> None:
    for norm, left, divides in ranks.run(clipped, kind, world=2):
        assert norm > 1
        assert divides == (kind == "fused")
        assert left == pytest.approx(norm if divides else 0.5, rel=1e-4)
