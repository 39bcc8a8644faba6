"""The verdict on a step, and updates that a bad verdict leaves out: every optimizer, state and all, bitwise."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.contracts.optimizer import Optimizer
from fullshard.faults.guard import Guard
from fullshard.faults.judge import Judge, Verdict, poisoned, update
from fullshard.optim.adamw import AdamW
from fullshard.optim.adamw_8bit import AdamW8bit
from fullshard.optim.muon import Muon


def verdict(*, bad: bool) -> Verdict:
    return Verdict(torch.tensor(bad), torch.tensor(0.0), torch.tensor(math.nan if bad else 1.0))


class Plain(Optimizer):
    """A user's own optimizer, which knows nothing of a guard."""

    def open(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.groups(named_parameters), lr=self.lr, momentum=0.9)


KINDS = {"adamw": AdamW, "muon": Muon, "own": Plain, "adamw_8bit": AdamW8bit}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while torchao's update is compiled
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind == "adamw_8bit" else []) for kind in KINDS]
)
def test_a_bad_step_leaves_weights_and_state_as_they_are(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(64, 64)]), "head": nn.Linear(64, 3)})
    optimizer = KINDS[kind](lr=0.1).open(model.named_parameters())  # type: ignore[abstract, unused-ignore]

    def step(*, bad: bool) -> tuple[Any, Any]:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, math.nan if bad else 0.5)
        update(optimizer, verdict(bad=bad))
        return copy.deepcopy(model.state_dict()), _plain(optimizer.state_dict()["state"])

    first = step(bad=False)
    assert _same(first, step(bad=True))
    after = step(bad=False)
    assert not _same(first, after)
    assert all(bool(tensor.isfinite().all()) for tensor in after[0].values())
    assert not hasattr(optimizer, "found_inf") or optimizer.found_inf is None


def _plain(state: Any) -> Any:
    """A copy; 8-bit state cannot be copied, so as numbers."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, torch.Tensor):
        return state.clone() if type(state) is torch.Tensor else state.dequantize()
    return state


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(("value", "finite"), [(2.5, True), (0.0, True), (math.nan, False), (-math.inf, False)])
def test_a_loss_that_is_not_finite_has_such_a_gradient(value: float, finite: bool) -> None:
    """Even if the term that is NaN does not depend on the weights."""
    weight = torch.tensor(3.0, requires_grad=True)
    loss = poisoned(weight * 0.5 + torch.tensor(value))
    loss.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert (weight.grad.item() == 0.5) is finite
    assert bool(weight.grad.isfinite()) is finite
    assert not finite or loss.item() == 1.5 + value


def judged(judge: Judge, loss: float, norm: float = 1.0, *, scaled: bool = False) -> tuple[bool, float]:
    found = judge.judge(torch.tensor(norm), lambda: torch.tensor(loss, dtype=torch.float64), scaled=scaled)
    not_finite, deviation, _ = found.numbers.tolist()
    assert bool(found.bad) == bool(not_finite or deviation)
    return bool(not_finite), round(deviation, 3)


def test_the_norm_decides_and_with_a_scaler_the_loss() -> None:
    judge = Judge(Guard(), (), device=torch.device("cpu"))
    assert judged(judge, math.nan) == (False, 0.0), "not even computed: the norm has it"
    assert judged(judge, 1.0, math.inf) == judged(judge, 1.0, math.nan) == (True, 0.0)
    assert judged(judge, 1.0, math.inf, scaled=True) == (False, 0.0), "an overflow"
    assert judged(judge, math.nan, 1.0, scaled=True) == (True, 0.0)


def test_a_spike_is_far_above_the_median_of_a_full_window() -> None:
    judge = Judge(Guard(spike="skip", window=9, threshold=5.0), (), device=torch.device("cpu"))
    losses = [2.0, 2.2, 1.8, 2.1, 1.9, 2.0, 2.3, 1.7]
    assert all(judged(judge, loss) == (False, 0.0) for loss in losses)
    assert judged(judge, 100.0) == (False, 0.0), "only eight losses to compare with"
    judge.recall([*losses, 2.0])
    # By hand: the median is 2.0, the median distance 0.1.
    assert judged(judge, 2.0 + 4.9 * 0.14826) == (False, 0.0)
    judge.recall([*losses, 2.0])
    assert judged(judge, 2.0 + 5.1 * 0.14826) == (False, 5.1)
    assert judged(judge, -100.0) == (False, 0.0), "a fall is no spike"
    assert judge.recent() == [*losses[1:], 2.0, -100.0], "a spike is not compared with later"
    assert judged(judge, math.nan) == (True, 0.0)
    assert len(judge.recent()) == 9


def test_a_bad_step_leaves_batch_norm_statistics_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    judge = Judge(Guard(), (), device=torch.device("cpu"), model=model)
    before = copy.deepcopy(model.state_dict())
    for value, norm in ((math.nan, math.nan), (1.0, 1.0)):
        judge.begin()
        model(torch.randn(3, 4) * value)
        judged(judge, value, norm)
        assert _same(before, model.state_dict()) is math.isnan(norm)
    assert all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())


def test_equal_losses_do_not_divide_by_zero() -> None:
    judge = Judge(Guard(spike="skip", window=8), [2.0] * 8, device=torch.device("cpu"))
    assert judged(judge, 2.0) == (False, 0.0)
    assert judged(judge, 3.0)[1] > 0


def test_the_policy_in_one_line() -> None:
    assert Guard().describe() == "stop on NaN or Inf in the loss or the gradient norm"
    said = Guard(not_finite="skip", spike="rollback", limit=3).describe()
    assert said == (
        "skip on NaN or Inf in the loss or the gradient norm; rollback on a loss 8 robust deviations above the last "
        "100; stop after 3 times in a row"
    )
