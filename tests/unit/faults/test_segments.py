"""Segments of GPU memory that grow, unless the user has chosen; state that is created before the first step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fullshard.checkpoint.tensors import materialise_state
from fullshard.faults.segments import VARIABLES, begin_with_state, grow_segments


def test_segments_grow() -> None:
    environ: dict[str, str] = {}
    grow_segments(environ)
    assert environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_user_has_set_stays(name: str) -> None:
    environ = {name: "max_split_size_mb:512"}
    grow_segments(environ)
    assert environ == {name: "max_split_size_mb:512"}


def trained(*, early: bool, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> list[torch.Tensor]:
    """Weights and state after three updates; `early`: the state is created before the first one."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 8))
    optimizer = kind([weight], lr=0.1, weight_decay=0.1)
    if early:
        materialise_state(optimizer)
        optimizer.state[weight]["ema"] = weight.detach().clone()
        begin_with_state(optimizer)
    for step in range(3):
        weight.grad = torch.sin(weight.detach() * (step + 1))
        optimizer.step()
    return [weight.detach(), *(optimizer.state[weight][key] for key in sorted(optimizer.state[weight]))]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_state_that_is_created_early_changes_no_bit(kind: Callable[..., torch.optim.Optimizer]) -> None:
    late, early = trained(early=False, kind=kind), trained(early=True, kind=kind)
    assert len(late) == len(early)
    assert all(torch.equal(one, other) for one, other in zip(late, early, strict=True))


def test_only_state_that_the_first_update_would_create_stays() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    for kind, stays in ((torch.optim.AdamW, True), (torch.optim.Rprop, False)):
        optimizer = kind([weight], lr=0.1)
        materialise_state(optimizer)
        begin_with_state(optimizer)
        assert bool(optimizer.state) == stays
