"""Faster ways equal the plain ones: products by oneDNN, the loss in few passes, updates of plain slices; without the
switch none is used."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.fast import cross_entropy, onednn, run, switch, whole
from fullshard.fast.local_update import on_slices
from fullshard.optim.adamw import AdamW
from fullshard.text import linear_cross_entropy as loss
from tests.dist.sharded_model import spread
from tests.ranks import RankPool


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 5, 12), (7, 12), (1, 12)])
def test_a_linear_layer_by_onednn_equals_torchs(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], bias: bool
) -> None:
    monkeypatch.setattr(onednn, "is_faster", lambda: True)
    plain = nn.Linear(12, 9, bias=bias)
    fast = nn.Linear(12, 9, bias=bias)
    fast.load_state_dict(plain.state_dict())
    assert onednn.use_in(fast, compute=torch.float32)
    assert type(fast) is onednn.Linear
    results = []
    for layer in (plain, fast):
        inputs = drawn(*shape).requires_grad_()
        output = layer(inputs)
        output *= 2  # as some models do in place
        (output * drawn(*output.shape)).sum().backward()
        results.append([output, inputs.grad, *(p.grad for p in layer.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("0", False), ("", True), ("1", True)])
def test_the_switch_is_on_unless_the_variable_is_0(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool
) -> None:
    if value is None:
        monkeypatch.delenv("FULLSHARD_FAST", raising=False)
    else:
        monkeypatch.setenv("FULLSHARD_FAST", value)
    assert switch.is_on.__wrapped__() is expected  # not the answer that this process keeps


def held(*, on: bool) -> tuple[bool, bool, str, set[str], bool, bool]:
    """What a run's model and optimizer have of the faster ways, after what a run calls."""
    with mock.patch.object(switch, "is_on", return_value=on), mock.patch.object(onednn, "is_faster", return_value=True):
        module, plan, _ = spread({"architecture": "qwen3", "size": "tiny"}, torch.float32, strategy="auto")
        optimizer = AdamW(lr=1e-2).open(module.named_parameters())
        mesh = next(module.parameters()).device_mesh
        with mock.patch.object(whole, "keep_freed_memory", side_effect=None if on else AssertionError):
            found = run.prepare(module, plan, mesh, torch.device("cpu"))
        with run.within_step(module, optimizer):
            plain = not any(isinstance(p, DTensor) for p in module.parameters())
        weight = nn.Parameter(torch.ones(3, 2))
        served = cross_entropy.serves(torch.ones(4, 2), weight)
        kinds = {type(part).__module__ for part in module.modules() if isinstance(part, nn.Linear)}
        words = found.layout.reason.removeprefix(plan.layout.reason)
        return found is plan, plain, words, kinds, "_init_group" in vars(optimizer), served


def test_with_the_switch_off_nothing_is_used(ranks: RankPool) -> None:
    for world in (1, 2):
        for found in ranks.run(held, world=world, on=False):
            assert found == (True, False, "", {"torch.nn.modules.linear"}, False, False)


def test_with_the_switch_on_everything_is_used(ranks: RankPool) -> None:
    for world, way in ((1, "whole within a step"), (2, "gathered and reduced once in a step")):
        for found in ranks.run(held, world=world, on=True):
            words = f"; {way}; linear layers by oneDNN"
            assert found == (False, True, words, {"fullshard.fast.onednn"}, True, True)


def test_with_the_switch_off_the_loss_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "is_on", lambda: False)
    monkeypatch.setattr(cross_entropy, "of_head", None)
    hidden = drawn(6, 8).requires_grad_()
    value, _ = loss.linear_cross_entropy(hidden, drawn(11, 8), torch.arange(6))
    value.backward()
    assert hidden.grad is not None


def test_without_gain_layers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "is_faster", lambda: False)
    layer = nn.Linear(3, 3)
    assert not onednn.use_in(layer, compute=torch.float32)
    assert type(layer) is nn.Linear


CASES: dict[str, tuple[float, float | None, float]] = {
    "plain": (1.0, None, 1.0),
    "scale": (0.5, None, 1.0),
    "softcap": (2.0, 3.0, 4.0),
    "hopeless targets": (1.0, None, 400.0),  # their probabilities underflow
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("by_onednn", [True, False])
def test_the_loss_in_few_passes_equals_torchs(monkeypatch: pytest.MonkeyPatch, name: str, by_onednn: bool) -> None:
    monkeypatch.setattr(onednn, "is_faster", lambda: by_onednn)
    monkeypatch.setattr(switch, "is_on", lambda: True)
    monkeypatch.setattr(loss, "_LinearCrossEntropy", None)
    scale, softcap, size = CASES[name]
    targets = torch.tensor([3, -100, 0, 10, 6, 6])
    results = []
    for ours in (True, False):
        hidden, weight, bias = (
            drawn(6, 8).requires_grad_(),
            (size * drawn(11, 8)).requires_grad_(),
            drawn(11).requires_grad_(),
        )
        if ours:
            value, _ = loss.linear_cross_entropy(hidden, weight, targets, bias=bias, scale=scale, softcap=softcap)
        else:
            logits = scale * F.linear(hidden, weight, bias)
            logits = softcap * torch.tanh(logits / softcap) if softcap else logits
            value = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        (0.3 * value).backward()
        results.append([value, hidden.grad, weight.grad, bias.grad])
    assert torch.isfinite(results[0][0])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_the_few_passes_equal_the_plain_ones(name: str) -> None:
    scale, softcap, size = CASES[name]
    logits, targets = size * drawn(6, 11), torch.tensor([3, -100, 0, 10, 6, 6])
    found = cross_entropy.with_gradient(logits.clone(), targets, scale, softcap)
    value, _, gradient = loss._with_gradient(logits.clone(), targets, scale, softcap)
    for ours, theirs in zip(found, (value, gradient), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def updated(*, sliced: bool) -> tuple[list[torch.Tensor], list[bool]]:
    module, _, _ = spread({"architecture": "qwen3", "size": "tiny"}, torch.float32)
    optimizer: Any = AdamW(lr=1e-2).open(module.named_parameters())
    if sliced:
        on_slices(optimizer)
        first = optimizer._init_group
        on_slices(optimizer)
        assert optimizer._init_group is first, "twice is once"
    for step in range(2):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter) * (step + 0.5)
        optimizer.step()
    state = [optimizer.state[p]["exp_avg_sq"] for p in module.parameters()]
    values = [p.full_tensor().detach() for p in (*module.parameters(), *state)]
    return values, [isinstance(each, DTensor) for each in state]


def test_updates_of_plain_slices_change_no_bit(ranks: RankPool) -> None:
    for (found, kinds), (expected, _) in zip(
        ranks.run(updated, world=2, sliced=True), ranks.run(updated, world=2, sliced=False), strict=True
    ):
        assert all(map(torch.equal, found, expected))
        assert all(kinds), "checkpoints hold DTensors"


def test_freed_memory_can_be_kept() -> None:
    program = "from fullshard.fast.memory import keep_freed_memory; print(keep_freed_memory())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("True", "False")  # False: another system or C library


def test_the_benchmark_runs() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/cpu.py", "--tiny", "--ranks", "1"],
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if name != switch.VARIABLE},
    )
    assert "fullshard / HF Trainer, median (range) of 1 turns: tokens/s" in done.stdout
