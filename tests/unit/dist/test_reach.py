"""Parts of a block that are called from outside it are found by watching, whatever the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullshard.config.part import decode
from fullshard.contracts.model import Family
from fullshard.dist.wrap import find_blocks, reached_from_outside


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.shape = nn.Identity()
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.shape(self.inner(x)))
        return found


class Model(nn.Module):
    """Calls one part of its second block after the blocks have run, and one layer of another before."""

    def __init__(self, *, reaches: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.reaches = reaches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part: Any = self.blocks
        if self.reaches:
            x = part[2].inner[1](part[2].shape(x))
        for block in self.blocks:
            x = block(x)
        return part[1].inner(x) if self.reaches else x  # type: ignore[no-any-return]


def forward(module: nn.Module) -> None:
    module(torch.empty(1, 4, device="meta"))


NAMES = ["blocks.0", "blocks.1", "blocks.2"]


def test_parts_called_while_their_block_is_not_running_are_found() -> None:
    # A part without parameters may be called whenever one likes; of nested parts the outermost counts.
    assert reached_from_outside(Model(), NAMES, forward) == ["blocks.2.inner.1", "blocks.1.inner"]
    assert reached_from_outside(Model(reaches=False), NAMES, forward) == []


def test_the_module_itself_is_not_changed() -> None:
    module = Model()
    reached_from_outside(module, NAMES, forward)
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_a_forward_pass_that_fails_on_meta_finds_nothing() -> None:
    def look_at_values(module: nn.Module) -> None:
        forward(module)
        bool(torch.empty(1, device="meta") > 0)

    assert reached_from_outside(Model(), NAMES, look_at_values) == []


@pytest.mark.parametrize(("architecture", "reached"), [("dit", ["transformer_blocks.0.norm1.emb"]), ("unet", [])])
def test_denoisers_of_diffusers(architecture: str, reached: list[str]) -> None:
    settings = {"architecture": architecture, "size": "tiny", "classes": 10}
    shape = {"sample_size": 8, "in_channels": 1, "out_channels": 1}
    family: Any = decode(Family, {"kind": "diffusers", **settings, "overrides": shape}, where="model")
    module = family.build(processor=None)
    plan = find_blocks(module, hints=family.blocks(module), rehearse=family.rehearse)
    assert plan.reached == reached
    assert set(reached) <= set(plan.units)
