"""The comparison of two runs, on records and tensors made by hand: what differs is named by step and by tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullshard.prove.compare import Tolerance, compare_numbers, compare_samples, compare_tensors, steps_of

EXACT = Tolerance(exact=True)
NEAR = Tolerance(exact=False, losses=1e-6, norms=1e-4, updates=1e-2, moments=1e-3)


def records(**changes: Any) -> list[dict[str, Any]]:
    """Five steps; `loss3=4.0` changes one number of one step."""
    found: list[dict[str, Any]] = []
    for step in range(1, 6):
        found.append({"kind": "event", "event": "samples", "step": step, "sample_ids": [10 * step, 10 * step + 1]})
        found.append({"kind": "train", "step": step, "loss": 5.0 - step / 10, "grad_norm": 1.0, "lr": 0.1, "mfu": 1.0})
    for key, value in changes.items():
        name, step = key[:-1], int(key[-1])
        place = next(r for r in found if r["step"] == step and name in r)
        place[name] = value
    return [*found, {"kind": "event", "event": "finished", "step": 5}]


@pytest.mark.parametrize("within", [EXACT, NEAR])
def test_equal_runs_are_equal(within: Tolerance) -> None:
    ours, theirs = steps_of(records(mfu2=0.5)), steps_of(records())
    assert sorted(ours.numbers) == sorted(ours.samples) == [1, 2, 3, 4, 5]
    assert compare_samples(ours, theirs, within=within).word == "same"
    seen = compare_numbers(ours, theirs, within=within)
    assert (seen.word, seen.drift) == ("bitwise", None), "what a step took is no part of it"


def test_the_first_step_with_other_samples_is_named() -> None:
    seen = compare_samples(steps_of(records(sample_ids3=[30, 7], sample_ids4=[1, 2])), steps_of(records()), within=NEAR)
    assert (seen.step, seen.word) == (3, "step 3")
    assert seen.drift == "step 3 reads the wrong samples: 7 instead of 31"


def test_the_order_within_a_step_matters_only_on_the_same_ranks() -> None:
    ours, theirs = steps_of(records(sample_ids2=[21, 20])), steps_of(records())
    assert compare_samples(ours, theirs, within=NEAR).drift is None
    assert compare_samples(ours, theirs, within=EXACT).drift == "step 2 reads its samples in a different order"


def test_a_sample_that_is_read_twice_is_a_drift() -> None:
    seen = compare_samples(steps_of(records(sample_ids2=[20, 20, 21])), steps_of(records()), within=NEAR)
    assert (seen.step, seen.drift) == (2, "step 2 reads some samples twice")


def test_the_first_step_with_another_loss_is_named() -> None:
    least = 4.7 * (1 + 2**-52)
    seen = compare_numbers(steps_of(records(loss3=least, loss4=9.0)), steps_of(records()), within=EXACT)
    assert seen.step == 3
    assert seen.drift == f"step 3 has loss {least!r} instead of 4.7 (off by 1.9e-16, allowed: bitwise)"
    assert compare_numbers(steps_of(records(loss3=least)), steps_of(records()), within=NEAR).drift is None


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({"loss2": 4.8 * (1 + 2e-6)}, False),
        ({"loss5": 4.5 * (1 + 2e-6)}, True),
        ({"loss5": 4.5 * (1 + 2e-5)}, False),
        ({"grad_norm2": 1 + 5e-5}, True),
        ({"grad_norm2": 1 + 2e-4}, False),
        ({"grad_norm2": None}, False),
        ({"lr4": 0.2}, False),
    ],
    ids=str,
)
def test_rounding_is_allowed_and_no_more(change: dict[str, Any], allowed: bool) -> None:
    seen = compare_numbers(steps_of(records(**change)), steps_of(records()), within=NEAR)
    assert (seen.drift is None) == allowed
    assert allowed or seen.step == int(next(iter(change))[-1])


def test_steps_that_were_not_taken_are_missing() -> None:
    ours, theirs = steps_of(records(), last=3), steps_of(records())
    assert compare_samples(ours, theirs, within=EXACT).drift == "step 4 is missing"
    assert compare_numbers(ours, theirs, within=EXACT).step == 4


class Stored:
    """Tensors in memory, read as those of a checkpoint are."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.tensors = {
            "model/a.weight": torch.randn(8, 4),
            "model/a.bias": torch.randn(8),
            "model/frozen": torch.ones(3),
        }
        for name in ("a.weight", "a.bias"):
            shape = self.tensors[f"model/{name}"].shape
            self.tensors[f"optimizer/{name}/exp_avg"] = torch.randn(shape)
            self.tensors[f"optimizer/{name}/exp_avg_sq"] = torch.rand(shape) + 0.5
            self.tensors[f"optimizer/{name}/step"] = torch.tensor(6.0)

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        tensor = self.tensors[name]
        return tensor[start:stop] if tensor.dim() else tensor


@pytest.mark.parametrize("within", [EXACT, NEAR])
def test_equal_tensors_are_equal(within: Tolerance) -> None:
    seen = compare_tensors(Stored(), Stored(), within=within, step=6)
    assert (seen.word, seen.drift) == ("bitwise", None)


@pytest.mark.parametrize("name", sorted(Stored().names()))
def test_one_bit_of_any_tensor_is_found_where_all_must_be_equal(name: str) -> None:
    ours = Stored()
    flat = ours.tensors[name].reshape(-1)
    flat[-1] = torch.nextafter(flat[-1], torch.tensor(99.0))
    seen = compare_tensors(ours, Stored(), within=EXACT, step=4)
    assert (seen.tensor, seen.step, seen.word) == (name, 4, "1 differ")
    assert seen.drift is not None
    assert seen.drift.startswith(f"after step 4, 1 of {len(ours.names())} tensors differ, most {name} (off by ")


def test_the_tensor_that_differs_most_is_named() -> None:
    ours = Stored()
    ours.tensors["model/a.weight"] *= 1.02
    ours.tensors["model/a.bias"] *= 1.1
    ours.tensors["optimizer/a.bias/exp_avg"] *= 1 + 1e-4
    seen = compare_tensors(ours, Stored(), within=NEAR, step=6)
    assert (seen.tensor, seen.word) == ("model/a.bias", "2 differ")
    assert seen.worst == pytest.approx(0.1, rel=1e-5)


def test_weights_are_held_to_the_size_of_their_updates() -> None:
    """With a small learning rate a wrong update is a small share of the weight, and none of the update."""
    before, ours, theirs = Stored(), Stored(), Stored()
    update = 1e-4 * torch.randn(8, 4)
    theirs.tensors["model/a.weight"] += update
    ours.tensors["model/a.weight"] += update * (1 + 1e-3)
    assert compare_tensors(ours, theirs, within=NEAR, step=6, before=before).drift is None
    ours.tensors["model/a.weight"] += update
    seen = compare_tensors(ours, theirs, within=NEAR, step=6, before=before)
    assert seen.tensor == "model/a.weight"
    assert seen.worst == pytest.approx(1.0, rel=2e-2)
    assert seen.drift is not None
    assert "allowed: 1e-02 of the last updates" in seen.drift


def test_updates_below_the_last_digit_may_round_either_way() -> None:
    ours, theirs = Stored(), Stored()
    ours.tensors["model/a.weight"] = torch.nextafter(ours.tensors["model/a.weight"], torch.tensor(99.0))
    assert compare_tensors(ours, theirs, within=NEAR, step=6, before=Stored()).drift is None


def test_a_gradient_of_another_size_is_found_though_adam_hides_it_from_the_weights() -> None:
    ours = Stored()
    ours.tensors["optimizer/a.weight/exp_avg"] *= 2
    assert compare_tensors(ours, Stored(), within=NEAR, step=6).tensor == "optimizer/a.weight/exp_avg"


def test_elements_whose_gradient_is_noise_may_differ() -> None:
    """As a third of GPT-2's fused attention bias does."""
    ours, theirs = Stored(), Stored()
    for stored in (ours, theirs):
        stored.tensors["optimizer/a.bias/exp_avg_sq"][2:5] = 1e-14
    ours.tensors["model/a.bias"][2:5] *= -1
    assert compare_tensors(ours, theirs, within=NEAR, step=6).drift is None
    ours.tensors["model/a.bias"][5] *= -1
    assert compare_tensors(ours, theirs, within=NEAR, step=6).tensor == "model/a.bias"


@pytest.mark.parametrize("within", [EXACT, NEAR])
def test_nan_another_shape_or_a_missing_tensor_is_found(within: Tolerance) -> None:
    broken, reshaped, fewer = Stored(), Stored(), Stored()
    broken.tensors["model/a.bias"][0] = torch.nan
    reshaped.tensors["model/a.bias"] = reshaped.tensors["model/a.bias"][:4]
    del fewer.tensors["model/a.bias"]
    for ours in (broken, reshaped, fewer):
        assert compare_tensors(ours, Stored(), within=within, step=6).tensor == "model/a.bias"
    seen = compare_tensors(Stored(), fewer, within=within, step=6)
    assert seen.drift is not None
    assert "has 1 too many" in seen.drift
