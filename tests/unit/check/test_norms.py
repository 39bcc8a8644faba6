"""Norms with statistics in half precision are found; those of torch and Transformers are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fullshard.check.norms import low_precision_norms
from tests.unit.hf.architectures import CAUSAL, build


class Scaled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class LowRMSNorm(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LowLayerNorm(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return self.weight * (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6))


class GoodRMSNorm(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exact = x.float()
        scale = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (exact * scale).to(x.dtype)


class GatedNorm(Scaled):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.weight * x * gate


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("compute", HALVES)
@pytest.mark.parametrize("width", [64, 128, 1024])
@pytest.mark.parametrize("norm", [LowRMSNorm, LowLayerNorm])
def test_statistics_in_half_precision_are_found(norm: type[Scaled], width: int, compute: torch.dtype) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"layers": nn.Sequential(norm(width), norm(width)), "last": GoodRMSNorm(width)})
    (found,) = low_precision_norms(model, compute=compute)
    assert (found.class_name, found.where) == (norm.__name__, "layers.0")
    assert not found.apart <= found.allowed


@pytest.mark.parametrize("compute", HALVES)
@pytest.mark.parametrize("width", [8, 32, 128, 1024])
def test_exact_statistics_pass(width: int, compute: torch.dtype) -> None:
    model = nn.Sequential(nn.LayerNorm(width), nn.RMSNorm(width), GoodRMSNorm(width), nn.BatchNorm1d(width))
    assert low_precision_norms(model, compute=compute) == []


@pytest.mark.parametrize("architecture", sorted(CAUSAL))
def test_the_norms_of_transformers_pass(architecture: str) -> None:
    model = build(architecture)
    assert any("Norm" in type(part).__name__ for part in model.modules())
    for compute in HALVES:
        assert low_precision_norms(model, compute=compute) == []


def test_what_cannot_be_tried_is_left_alone_and_fp32_needs_no_trial() -> None:
    assert low_precision_norms(nn.Sequential(GatedNorm(64))) == []
    assert low_precision_norms(nn.Sequential(LowRMSNorm(64)), compute=torch.float32) == []
