"""Every loss, over ranks and in blocks, against a formula written out with loops in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch

from fullshard.config.part import kinds
from fullshard.similarity import row_blocks
from fullshard.similarity.base import Embedded, SimilarityLoss
from tests.unit.similarity import plain
from tests.unit.similarity.steps import assert_close, confusable, leaves, part, step, with_gradients

UNEVEN = (2, 1, 2, 3, 1, 2)
"""Negatives of each real sample; two fillers make eight."""
ORDER = torch.tensor([0, 1, 2, 6, 3, 4, 5, 7])
"""Every rank's samples are followed by its fillers, so there are some in the middle."""
Formula = Callable[[Embedded], torch.Tensor]
CASES: dict[str, tuple[dict[str, Any], Formula]] = {
    "infonce": ({}, plain.infonce),
    "infonce in_batch": ({"negatives": "in_batch"}, partial(plain.infonce, scope="in_batch")),
    "infonce own": ({"negatives": "own"}, partial(plain.infonce, scope="own")),
    "infonce bidirectional": ({"bidirectional": True}, partial(plain.infonce, bidirectional=True)),
    "infonce learned": ({"learn_temperature": True}, plain.infonce),
    "infonce labels only": ({"mask_equal": False}, partial(plain.infonce, equal=False)),
    "infonce equal only": ({"mask_labels": False}, partial(plain.infonce, labels=False)),
    "in_batch_hard": ({}, partial(plain.in_batch_hard, top_k=3)),
    "in_batch_hard all": ({"top_k": 1000}, plain.infonce),
    "sigmoid": ({}, plain.sigmoid),
    "triplet": ({}, plain.triplet),
    "cosent": ({}, plain.cosent),
    "late_interaction": ({}, plain.late_interaction),
    "distillation": ({"alpha": 0.25}, partial(plain.distillation, alpha=0.25)),
    "distillation mse": (
        {"divergence": "mse", "alpha": 0.25},
        partial(plain.distillation, divergence="mse", alpha=0.25),
    ),
    "distillation alone": ({"alpha": 1}, partial(plain.distillation, alpha=1.0)),
}
Wanted = Callable[[str], dict[str, torch.Tensor]]


def made(case: str) -> tuple[SimilarityLoss, Embedded]:
    loss = part(case.split(" ")[0], **CASES[case][0])
    embedded = step(loss, negatives=UNEVEN, fillers=2)
    if loss.needs_labels:
        embedded = replace(embedded, labels=torch.tensor([0, 0.5, 1, 0.5, 0.2, 1, 0.3, 0.3]).double())
    else:
        embedded = confusable(embedded)
    values = {field.name: getattr(embedded, field.name) for field in fields(embedded)}
    mixed: dict[str, Any] = {name: value[ORDER] for name, value in values.items() if isinstance(value, torch.Tensor)}
    return loss, leaves(replace(embedded, **mixed))


def test_every_loss_has_a_formula() -> None:
    assert {case.split(" ")[0] for case in CASES} == set(kinds(SimilarityLoss))


def test_the_masks_of_the_step_have_something_to_leave_out(wanted: Wanted) -> None:
    losses = [float(wanted(case)["loss"]) for case in ("infonce", "infonce labels only", "infonce equal only")]
    assert losses[0] < min(losses[1:])


@pytest.fixture(scope="module")
def wanted() -> Wanted:
    known: dict[str, dict[str, torch.Tensor]] = {}

    def of(case: str) -> dict[str, torch.Tensor]:
        if case not in known:
            known[case] = with_gradients(CASES[case][1], made(case)[1], torch.float64)
        return known[case]

    return of


@pytest.mark.parametrize("entries", [2**25, 40])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("case", sorted(CASES))
def test_sums_and_gradients_of_all_ranks_are_those_of_the_formula(
    case: str,
    ranks: int,
    entries: int,
    wanted: Wanted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fillers and negatives that are not there hold NaN; with eight ranks two have nothing but a filler."""
    monkeypatch.setattr(row_blocks, "ENTRIES", entries)
    loss, embedded = made(case)
    size = len(embedded.real) // ranks
    shares = [
        with_gradients(loss.loss, replace(embedded, own=slice(rank * size, (rank + 1) * size))) for rank in range(ranks)
    ]
    found = {name: torch.stack([share[name] for share in shares]).sum(0) for name in shares[0]}
    assert_close(found, wanted(case))


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_rank_of_fillers_still_takes_part_in_the_backward_pass(case: str) -> None:
    """Its gradients are zeros, not missing: the gather over ranks waits for them."""
    loss, embedded = made(case)
    value = loss.loss(replace(embedded, own=slice(3, 4)))
    value.backward()
    assert value == 0
    for used in (embedded.queries, embedded.positives):
        assert used.grad is not None
        assert not used.grad.any()


@pytest.mark.parametrize("case", sorted(CASES))
def test_without_gradients_the_loss_is_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_blocks, "ENTRIES", 40)
    loss, embedded = made(case)
    with torch.no_grad():
        value = loss.loss(embedded)
    assert not value.requires_grad
    assert float(value) == pytest.approx(float(loss.loss(embedded).detach()), rel=1e-6)


@pytest.mark.parametrize("case", sorted(CASES))
def test_embeddings_of_length_zero_give_finite_gradients(case: str) -> None:
    loss, embedded = made(case)
    with torch.no_grad():
        embedded.queries[0] = 0
        embedded.positives[1] = 0
        embedded.negatives[2, 0] = 0
    found = with_gradients(loss.loss, embedded)
    assert all(bool(value.isfinite().all()) for value in found.values())
