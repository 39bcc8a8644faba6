"""What losses refuse, need and learn; and what their masks leave out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fullshard.config.part import decode, kinds, plain
from fullshard.errors import RecipeError
from fullshard.similarity.base import SimilarityLoss
from tests.unit.similarity.steps import part, step, with_gradients


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "infonce", "temperature": 0}, r"loss\.temperature = 0: it must be more than 0"),
        ({"kind": "infonce", "temperature": -0.1}, r"loss\.temperature = -0\.1: it must be more than 0"),
        ({"kind": "infonce", "temperature": float("nan")}, r"loss\.temperature = \.nan: it must be a finite number"),
        (
            {"kind": "infonce", "negatives": "owm"},
            r"loss\.negatives = 'owm'.*shared, in_batch, own \(did you mean 'own'",
        ),
        (
            {"kind": "infonce", "negatives": "own", "bidirectional": True},
            r"loss: bidirectional compares.*Use negatives: in_batch, or bidirectional: false",
        ),
        ({"kind": "in_batch_hard", "temperature": 0}, r"loss\.temperature = 0: it must be more than 0"),
        ({"kind": "in_batch_hard", "top_k": 0}, r"loss\.top_k = 0: it must be at least 1"),
        ({"kind": "in_batch_hard", "top_k": 1.5}, r"loss\.top_k = 1\.5: it must be a whole number"),
        ({"kind": "triplet", "margin": 0}, r"loss\.margin = 0: it must be more than 0"),
        ({"kind": "triplet", "distance": "l2"}, r"loss\.distance = 'l2': it must be one of cosine, euclidean"),
        ({"kind": "cosent", "scale": 0}, r"loss\.scale = 0: it must be more than 0"),
        ({"kind": "sigmoid", "log_scale": 14.3}, r"loss\.log_scale = 14\.3: it must be at most 4\.6"),
        ({"kind": "late_interaction", "temperature": 0}, r"loss\.temperature = 0: it must be more than 0"),
        ({"kind": "late_interaction", "block": 0}, r"loss\.block = 0: it must be at least 1"),
        ({"kind": "distillation", "temperature": 0}, r"loss\.temperature = 0: it must be more than 0"),
        ({"kind": "distillation", "alpha": 0}, r"loss\.alpha = 0: it must be more than 0"),
        ({"kind": "distillation", "alpha": 1.5}, r"loss\.alpha = 1\.5: it must be at most 1"),
        ({"kind": "distillation", "divergence": "js"}, r"loss\.divergence = 'js': it must be one of kl, mse"),
        ({"kind": "distillation", "task": {"temperature": 0}}, r"loss\.task\.temperature = 0: it must be more"),
        ({"kind": "distillation", "task": "late_interaction"}, r"loss\.task = .*late_interaction cannot be combined"),
        ({"kind": "distillation", "task": "distillation"}, r"loss\.task = .*distillation cannot be combined"),
        ({"kind": "infonse"}, r"loss\.kind = 'infonse' is not known.*did you mean 'infonce'"),
        ({"kind": "infonce", "temprature": 1}, r"loss\.temprature is not a known key \(did you mean 'temperature'"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        decode(SimilarityLoss, settings, where="loss")


@pytest.mark.parametrize("kind", kinds(SimilarityLoss))
def test_a_loss_is_named_by_one_word_and_survives_being_written_down(kind: str) -> None:
    loss = decode(SimilarityLoss, kind, where="loss")
    assert loss.kind() == kind
    assert decode(SimilarityLoss, plain(loss), where="loss") == loss


def test_what_each_loss_needs() -> None:
    losses = {kind: part(kind) for kind in kinds(SimilarityLoss)}
    assert {k for k, loss in losses.items() if loss.requires_negatives()} == {"triplet"}
    assert {k for k, loss in losses.items() if loss.needs_labels} == {"cosent"}
    assert {k for k, loss in losses.items() if loss.needs_teacher} == {"distillation"}
    assert {k for k, loss in losses.items() if loss.tokens} == {"late_interaction"}
    assert {k for k, loss in losses.items() if not loss.in_batch} == {"triplet"}
    own = part("infonce", negatives="own")
    assert own.requires_negatives()
    assert not own.in_batch


def test_a_distillation_needs_what_its_task_needs() -> None:
    assert part("distillation", task="triplet").requires_negatives()
    assert part("distillation", task="cosent").needs_labels
    assert part("distillation", task={"learn_temperature": True}).learned() == {"log_scale": math.log(20)}
    alone = part("distillation", alpha=1, task={"negatives": "own", "learn_temperature": True})
    assert not alone.requires_negatives()
    assert alone.learned() == {}


def test_what_is_learned_starts_at_the_settings() -> None:
    assert part("infonce").learned() == {}
    assert part("infonce", learn_temperature=True, temperature=0.1).learned() == {"log_scale": math.log(10)}
    assert part("sigmoid").learned() == {"log_scale": 2.6592, "bias": -10.0}
    assert part("sigmoid", learn=False).learned() == {}


@pytest.mark.parametrize("settings", [{"kind": "infonce", "learn_temperature": True}, {"kind": "sigmoid"}])
def test_learned_numbers_do_at_first_what_fixed_ones_do(settings: dict[str, Any]) -> None:
    learned, fixed = (
        part(**settings),
        part(settings["kind"], **({"learn": False} if "sigmoid" in settings.values() else {})),
    )
    found = with_gradients(learned.loss, step(learned))
    assert float(found["loss"]) == pytest.approx(float(with_gradients(fixed.loss, step(fixed))["loss"]), rel=1e-6)
    assert all(float(found[name]) != 0 for name in learned.learned())


def test_a_learned_scale_stops_at_100_and_can_come_back() -> None:
    loss = part("infonce", learn_temperature=True)
    beyond = replace(step(loss), scalars={"log_scale": torch.tensor(math.log(200.0))})
    found = with_gradients(loss.loss, beyond)
    fixed = with_gradients(part("infonce", temperature=0.01).loss, step())
    assert float(found["loss"]) == pytest.approx(float(fixed["loss"]), rel=1e-5)
    assert float(found["log_scale"]) != 0


KINDS_WITH_MASKS = ["infonce", "in_batch_hard", "late_interaction", "sigmoid"]


@pytest.mark.parametrize("kind", KINDS_WITH_MASKS)
@pytest.mark.parametrize("mask", ["mask_labels", "mask_equal"])
def test_a_masked_sample_pushes_its_like_nowhere(kind: str, mask: str) -> None:
    """Of two samples that belong together, neither query has the other's positive among its negatives."""
    masks = {"mask_labels": False, "mask_equal": False}
    loss, off = part(kind, **{**masks, mask: True}), part(kind, **masks)
    embedded = step(loss, negatives=(1, 1))
    if mask == "mask_labels":
        embedded = replace(embedded, labels=torch.tensor([7.0, 7.0]).double())
    else:
        embedded = replace(embedded, positive_keys=torch.tensor([5, 5]))
    first = replace(embedded, own=slice(0, 1))
    assert not with_gradients(loss.loss, first)["positives"][1].nan_to_num().any()
    assert with_gradients(off.loss, first)["positives"][1].any()


@pytest.mark.parametrize("kind", KINDS_WITH_MASKS)
def test_a_hard_negative_equal_to_the_positive_is_no_negative(kind: str) -> None:
    settings = {"top_k": 9} if kind == "in_batch_hard" else {}
    loss, off = part(kind, **settings), part(kind, mask_equal=False, **settings)
    embedded = step(loss, negatives=(2, 2))
    keys = embedded.negative_keys.clone()
    keys[0, 1] = embedded.positive_keys[0]
    first = replace(embedded, negative_keys=keys, own=slice(0, 1))
    found = with_gradients(loss.loss, first)["negatives"]
    assert not found[0, 1].any()
    assert found[0, 0].any()
    assert with_gradients(off.loss, first)["negatives"][0, 1].any()


def test_samples_without_a_label_do_not_match() -> None:
    embedded = replace(step(), labels=torch.full((8,), math.nan, dtype=torch.float64))
    assert torch.equal(part("infonce").loss(embedded), part("infonce", mask_labels=False).loss(embedded))


def test_equal_labels_rank_nothing() -> None:
    embedded = replace(step(), labels=torch.ones(8, dtype=torch.float64))
    found = with_gradients(part("cosent").loss, embedded)
    assert all(bool((value == 0).all()) for value in found.values())


def test_late_interaction_keeps_no_comparison_of_tokens() -> None:
    """They are the largest by far: queries x documents x tokens x tokens."""
    loss = part("late_interaction", block=8)
    embedded, shapes = step(loss), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss.loss(embedded)
    assert (8, 8, 5) in shapes
    assert (8, 8, 5, 6) not in shapes


@pytest.mark.parametrize("kind", [kind for kind in kinds(SimilarityLoss) if kind not in ("triplet", "cosent")])
def test_a_step_without_hard_negatives_works(kind: str) -> None:
    loss = part(kind)
    embedded = step(loss, negatives=(1,) * 6)
    names = ("negatives", "has_negative", "negative_keys", "negative_tokens", "teacher_negatives")
    values = {name: getattr(embedded, name) for name in names}
    none = {name: value[:, :0] for name, value in values.items() if value is not None}
    found = with_gradients(loss.loss, replace(embedded, **none))
    assert float(found["loss"]) > 0
    assert found["positives"].nan_to_num().any()
