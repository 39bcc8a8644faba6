"""Our Triton kernels against torch's own operators: results and gradients, for sizes that fit blocks and sizes that do
not. Interpreted, so this says nothing about speed; `benchmarks/diffusion.py` does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor

import pytest
import torch
import torch.nn.functional as F

from tests.near import assert_near
from tests.triton_interpreter import compare, interpreter

Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Executor]:
    with interpreter() as process:
        yield process


def _modulated(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]


norm_sizes = pytest.mark.parametrize(("batch", "tokens", "width"), [(2, 9, 72), (1, 3, 64), (1, 8, 100)])


@norm_sizes
def test_modulated_norm(interpreted: Executor, batch: int, tokens: int, width: int) -> None:
    interpreted.submit(modulated_norm, batch, tokens, width).result()


def modulated_norm(batch: int, tokens: int, width: int) -> None:
    from fullshard.families.diffusion.kernels.modulated_norm import modulated_norm

    def ours(x: torch.Tensor, vectors: torch.Tensor) -> Pair:
        scale, _, shift = vectors.chunk(3, dim=1)  # slices of one tensor, as a model has them
        return modulated_norm(x, scale, shift, eps=1e-6)

    def plain(x: torch.Tensor, vectors: torch.Tensor) -> Pair:
        scale, _, shift = vectors.chunk(3, dim=1)
        return x * 1, _modulated(x, scale, shift)

    compare(ours, plain, torch.randn(batch, tokens, width), torch.randn(batch, 3 * width))


@norm_sizes
def test_gated_norm(interpreted: Executor, batch: int, tokens: int, width: int) -> None:
    interpreted.submit(gated_norm, batch, tokens, width).result()


def gated_norm(batch: int, tokens: int, width: int) -> None:
    from fullshard.families.diffusion.kernels import modulated_norm
    from fullshard.families.diffusion.kernels.modulated_norm import gated_norm

    modulated_norm.TOKENS = 4  # more than one program for a sample, the last one with fewer tokens

    def ours(x: torch.Tensor, branch: torch.Tensor, vectors: torch.Tensor, bias: torch.Tensor) -> Pair:
        gate, scale, shift = vectors.chunk(3, dim=1)
        return gated_norm(x, branch + bias.detach(), gate, scale, shift, bias, eps=1e-6)

    def plain(x: torch.Tensor, branch: torch.Tensor, vectors: torch.Tensor, bias: torch.Tensor) -> Pair:
        gate, scale, shift = vectors.chunk(3, dim=1)
        total = x + gate[:, None] * (branch + bias)
        return total, _modulated(total, scale, shift)

    # Not contiguous, as the first block's input is.
    x = torch.randn(batch, width, tokens).transpose(1, 2)
    compare(ours, plain, x, torch.randn(batch, tokens, width), torch.randn(batch, 3 * width), torch.randn(width))


@norm_sizes
def test_gated_sum(interpreted: Executor, batch: int, tokens: int, width: int) -> None:
    interpreted.submit(gated_sum, batch, tokens, width).result()


def gated_sum(batch: int, tokens: int, width: int) -> None:
    from fullshard.families.diffusion.kernels import gated_sum as module
    from fullshard.families.diffusion.kernels.gated_sum import gated_sum

    module.TILE, module.TILES = 2, 2

    def ours(x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return gated_sum(x, branch + bias.detach(), gate, bias)

    def plain(x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x + gate[:, None] * (branch + bias)

    x, branch = torch.randn(2, batch, tokens, width).unbind()
    compare(ours, plain, x, branch, torch.randn(batch, width), torch.randn(width))


@pytest.mark.parametrize("shape", [(2, 33, 72), (20, 300)])
def test_biased_gelu(interpreted: Executor, shape: tuple[int, ...]) -> None:
    interpreted.submit(biased_gelu, shape).result()


def biased_gelu(shape: tuple[int, ...]) -> None:
    from fullshard.families.diffusion.kernels.biased_gelu import biased_gelu

    def plain(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.gelu(x + bias, approximate="tanh")

    compare(biased_gelu, plain, torch.randn(shape), torch.randn(shape[-1]))


@pytest.mark.parametrize(("batch", "tokens", "heads", "width"), [(2, 96, 2, 72), (1, 64, 1, 64), (2, 5, 3, 8)])
def test_packed_attention(interpreted: Executor, batch: int, tokens: int, heads: int, width: int) -> None:
    interpreted.submit(packed_attention, batch, tokens, heads, width).result()


def packed_attention(batch: int, tokens: int, heads: int, width: int) -> None:
    from fullshard.families.diffusion.kernels.packed_attention import packed_attention

    def ours(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        qkv = x + bias.detach().reshape(3, heads, width)
        return packed_attention(qkv, bias)

    def plain(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        qkv = x + bias.reshape(3, heads, width)
        return F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in qkv.unbind(2))).transpose(1, 2)

    compare(ours, plain, torch.randn(batch, tokens, 3, heads, width), torch.randn(3 * heads * width))


def test_packed_attention_with_scores_far_below_zero(interpreted: Executor) -> None:
    interpreted.submit(scores_far_below_zero).result()


def scores_far_below_zero() -> None:
    """Where a row's exponents are tiny, keys that are not there must not count: of a power of two their score is 0."""
    from fullshard.families.diffusion.kernels.packed_attention import packed_attention

    qkv = torch.ones(1, 5, 3, 1, 16)
    qkv[:, :, 0], qkv[:, :, 1] = 30.0, -30.0
    qkv += 0.01 * torch.randn_like(qkv)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in x.unbind(2))).transpose(1, 2)

    found = packed_attention(qkv.requires_grad_())
    gradient = torch.autograd.grad(found.sum(), qkv)[0]
    expected = torch.autograd.grad(plain(qkv).sum(), qkv)[0]
    assert gradient.isfinite().all()
    assert_near(gradient, expected, within=1e-3)
