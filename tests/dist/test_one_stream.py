"""Gradients on the stream that computes: the same numbers as on FSDP's own stream, to the last bit.

On a CPU streams are names only; what memory they save is measured on a GPU (benchmarks/plan.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullshard.fast import one_stream
from tests.dist.sharded_model import spread, tokens
from tests.ranks import RankPool

MODEL = {"architecture": "qwen3", "size": "tiny"}


def losses(*, one: bool) -> tuple[list[float], bool]:
    """Of a few steps; and whether reductions run on the stream that computes."""
    module, _, _ = spread(MODEL, torch.bfloat16)
    if one:
        one_stream.use_one_stream(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    found = []
    for _ in range(3):
        loss = module(input_ids=tokens(64)).logits.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    shared: Any = module._get_fsdp_state()._comm_ctx
    return found, shared.reduce_scatter_stream is shared.device_handle.current_stream()


def test_one_stream_changes_no_bit(ranks: RankPool) -> None:
    [(expected, apart)] = ranks.run(losses, world=1, one=False)
    [(found, together)] = ranks.run(losses, world=1, one=True)
    assert found == expected
    assert len(set(found)) == 3, "the steps must change something"
    assert together
    assert not apart


def test_another_torch_is_left_alone(ranks: RankPool) -> None:
    [(found, _)] = ranks.run(without_names, world=1)
    assert len(found) == 3


def without_names() -> tuple[list[float], bool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_stream, "fsdp_modules", lambda module: [_Renamed()])
        return losses(one=True)


class _Renamed:
    """A unit of a torch that has other private names."""

    def _get_fsdp_state(self) -> object:
        return object()
