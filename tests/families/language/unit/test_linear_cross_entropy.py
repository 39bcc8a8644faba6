"""The chunked loss against torch's own cross-entropy on full logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from fullshard.text import linear_cross_entropy as module
from fullshard.text.linear_cross_entropy import chunk_length, linear_cross_entropy
from tests.near import assert_near


def reference(hidden, weight, targets, bias, scale, softcap):  # type: ignore[no-untyped-def]
    logits = (hidden @ weight.T + (bias if bias is not None else 0)) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), logits


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (1.0, 3.0), (0.5, 2.0)])
def test_equals_cross_entropy_and_its_gradients(
    bias: bool, scale: float, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_RANGE", (1, 1))  # 128 tokens a chunk: three chunks, the last one short
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 24), torch.randn(101, 24)
    offset = torch.randn(101) if bias else None
    targets = torch.randint(0, 101, (300,))
    targets[::7] = -100
    inputs = [t.requires_grad_() for t in (hidden, weight, offset) if t is not None]
    loss, _ = linear_cross_entropy(hidden, weight, targets, bias=offset, scale=scale, softcap=softcap)
    grads = torch.autograd.grad(loss * 0.5, inputs)
    expected, _ = reference(hidden, weight, targets, offset, scale, softcap)
    expected_grads = torch.autograd.grad(expected * 0.5, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert_near(ours, theirs)


def test_counts_the_most_likely_targets_without_grad() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 8), torch.randn(11, 8)
    targets = (hidden @ weight.T).argmax(-1)
    targets[:10] = (targets[:10] + 1) % 11
    targets[-4:] = -100
    with torch.no_grad():
        loss, correct = linear_cross_entropy(hidden, weight, targets)
    assert correct.item() == 64 - 10 - 4
    torch.testing.assert_close(loss, reference(hidden, weight, targets, None, 1.0, None)[0], rtol=1e-6, atol=0)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight = torch.randn(16, 8, requires_grad=True), torch.randn(11, 8)
    loss, _ = linear_cross_entropy(hidden, weight, torch.randint(0, 11, (16,)))
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_full_logits_never_exist() -> None:
    """Qwen3's vocabulary: a chunk holds a part of the tokens, fewer where the batch is small."""
    assert chunk_length(32768, 2048, 151936) == 4096
    assert chunk_length(4096, 2048, 151936) == 512
    assert chunk_length(64, 8, 11) == 64


def test_without_grad_a_trainable_head_is_counted_too() -> None:
    """In a validation the weights still require grad; only grad mode is off."""
    hidden, weight = torch.randn(16, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    targets = (hidden @ weight.T).argmax(-1)
    with torch.no_grad():
        _, correct = linear_cross_entropy(hidden, weight, targets)
    assert correct.item() == 16
