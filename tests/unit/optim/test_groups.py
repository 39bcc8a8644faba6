"""Parameter groups by name: which parameters go where, in every optimizer, and the errors for wrong patterns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from fullshard.config.part import decode
from fullshard.contracts.optimizer import Group, Optimizer, describe_groups, recompute_by_block
from fullshard.errors import RecipeError
from fullshard.step import _set_learning_rates
from tests.near import assert_near

GROUPS: list[dict[str, Any]] = [
    {"match": "embedding.*", "freeze": True},
    {"match": ["blocks.0.*"], "lr": 0.05, "weight_decay": 0.0},
    {"match": "*.bias", "lr": 0.002},
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6)) for _ in range(2))
        self.head = nn.Linear(6, 5)


def opened(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    part = decode(Optimizer, {"lr": 0.01, "weight_decay": 0.3, "groups": GROUPS, **settings}, where="optimizer")
    part.freeze(model)
    optimizer = part.open(model.named_parameters())
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", part.lr)
    return optimizer


def seen(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    """Rate and decay of each trained parameter."""
    names = {p: name for name, p in model.named_parameters()}
    return {
        names[p]: (round(float(group["lr"]), 7), group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon"])
def test_each_group_has_its_rate_and_decay_and_follows_the_schedule(kind: str) -> None:
    model = Model()
    optimizer = opened(model, kind=kind)
    _set_learning_rates(optimizer, 0.5)
    assert seen(model, optimizer) == {
        "blocks.0.0.weight": (0.025, 0.0),
        "blocks.0.1.weight": (0.025, 0.0),
        "blocks.0.0.bias": (0.025, 0.0),
        "blocks.0.1.bias": (0.025, 0.0),
        "blocks.1.0.weight": (0.005, 0.3),
        "blocks.1.1.weight": (0.005, 0.3),
        "head.weight": (0.005, 0.3),
        "blocks.1.0.bias": (0.001, 0.0),
        "blocks.1.1.bias": (0.001, 0.0),
        "head.bias": (0.001, 0.0),
    }
    assert not model.embedding.weight.requires_grad


def test_without_groups_matrices_and_vectors_are_separate() -> None:
    model = Model()
    groups = opened(model, groups=None).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(6, 0.3), (5, 0.0)]


def test_muon_with_groups_is_torchs_muon_with_groups_made_by_hand() -> None:
    torch.manual_seed(1)
    ours, theirs = Model(), Model()
    theirs.load_state_dict(ours.state_dict())
    optimizer = opened(ours, kind="muon", matrix_lr=0.03)
    named = dict(theirs.named_parameters())
    options: dict[str, Any] = {"momentum": 0.95, "nesterov": True, "adjust_lr_fn": "match_rms_adamw"}
    first, second = ([named[f"blocks.{i}.{j}.weight"] for j in (0, 1)] for i in (0, 1))
    muon = torch.optim.Muon(
        [{"params": first, "lr": 0.05, "weight_decay": 0.0}, {"params": second, "lr": 0.03, "weight_decay": 0.3}],
        **options,
    )
    biases = {n: p for n, p in named.items() if n.endswith("bias")}
    adamw = torch.optim.AdamW(
        [
            {"params": [named["head.weight"]], "lr": 0.01, "weight_decay": 0.3},
            {"params": [p for n, p in biases.items() if n.startswith("blocks.0")], "lr": 0.05, "weight_decay": 0.0},
            {"params": [p for n, p in biases.items() if "s.0." not in n], "lr": 0.002, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    for _ in range(3):
        for name, parameter in ours.named_parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
                named[name].grad = parameter.grad.clone()
        optimizer.step()
        muon.step()
        adamw.step()
    for name, parameter in ours.named_parameters():
        assert_near(parameter.detach(), named[name].detach(), what=name)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([{"match": "embeding.*"}], r"groups\[0\].match: 'embeding.\*' matches no parameter .*embedding"),
        ([{"match": "blocks.*"}, {"match": "blocks.0.*"}], r"groups\[1\].* only parameters of earlier groups"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(groups: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        opened(Model(), groups=groups)


def test_recompute_needs_a_whole_block() -> None:
    blocks = {"blocks.0": ["blocks.0.0.weight", "blocks.0.0.bias"], "blocks.1": ["blocks.1.0.weight"]}
    assert recompute_by_block([Group(match=["blocks.0.*"], recompute="full")], blocks) == {"blocks.0": "full"}
    with pytest.raises(RecipeError, match="no block is entirely in the group. Blocks are blocks.0, blocks.1"):
        recompute_by_block([Group(match=["*.0.bias"], recompute="full")], blocks)


def test_the_summary_describes_each_group() -> None:
    groups = [Group.model_validate(group) for group in GROUPS]
    names = [name for name, _ in Model().named_parameters()]
    assert describe_groups(groups, names) == [
        "embedding.*: 1 parameter, frozen",
        "blocks.0.*: 4 parameters, lr 0.05, weight decay 0",
        "*.bias: 3 parameters, lr 0.002",
    ]


def test_settings_of_a_group_are_checked() -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        Group(match=["a"], lr=0)
