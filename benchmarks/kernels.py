"""What one block of DiT-XL/2 costs at batch 256, kernel by kernel: ours beside torch.compile's and cuDNN's.

    python benchmarks/kernels.py

Each row: milliseconds of forward and of backward, how far ours is from fp32 (of the largest value), and for the step of
28 blocks what the difference makes. Needs a GPU; `--tiny` runs everything once on a CPU under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

BLOCKS, REPEATS = 28, 20
Run = Callable[..., Any]


class Bench:
    """The shapes, and how a function is timed."""

    def __init__(self, *, tiny: bool) -> None:
        self.tiny, self.device = tiny, "cpu" if tiny else "cuda"
        self.batch, self.tokens, self.heads, self.width = (2, 8, 2, 24) if tiny else (256, 256, 16, 72)
        self.hidden = self.heads * self.width

    def draw(self, *shape: int) -> torch.Tensor:
        made = torch.randn(*shape, device=self.device, dtype=torch.float32 if self.tiny else torch.bfloat16)
        return made.requires_grad_()

    def time(self, call: Callable[[], Any]) -> float:
        """Milliseconds, after a few calls to warm up."""
        if self.tiny:
            call()
            return 0.0
        for _ in range(5):
            call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPEATS):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / REPEATS

    def both(self, run: Run, inputs: list[torch.Tensor]) -> tuple[float, float]:
        """Forward and backward."""
        results = run(*inputs)
        results = list(results) if isinstance(results, tuple) else [results]
        weights = [torch.randn_like(result) for result in results]

        def backward() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(results, inputs, weights, retain_graph=True)

        with torch.no_grad():
            forward = self.time(lambda: run(*inputs))
        return forward, self.time(backward)

    def compare(self, name: str, ours: Run, plain: Run, inputs: list[torch.Tensor]) -> None:
        """A row, with the results of two samples beside those in fp32."""
        few = [tensor.detach()[:2] if tensor.dim() > 1 else tensor.detach() for tensor in inputs]
        found, expected = ours(*few), plain(*[tensor.float() for tensor in few])
        pairs = zip(*(value if isinstance(value, tuple) else (value,) for value in (found, expected)), strict=True)
        off = max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs)
        self.row(name, ours, plain if self.tiny else torch.compile(plain), inputs, off=f"{off:.1e}")

    def row(self, name: str, ours: Run, theirs: Run, inputs: list[torch.Tensor], *, off: str = "") -> None:
        times = [self.both(run, inputs) for run in (ours, theirs)]
        gained = BLOCKS * (sum(times[1]) - sum(times[0]))
        words = [f"{forward:.3f} + {backward:.3f}" for forward, backward in times]
        print(f"| {name} | {words[0]} | {words[1]} | {gained:+.1f} | {off} |", flush=True)


def norms(bench: Bench) -> None:
    from fullshard.families.diffusion.kernels.modulated_norm import gated_norm, modulated_norm

    def normed(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]

    def ours(x: torch.Tensor, vectors: torch.Tensor) -> Any:
        return modulated_norm(x, *vectors.chunk(2, dim=1), eps=1e-6)

    def plain(x: torch.Tensor, vectors: torch.Tensor) -> Any:
        return x * 1, normed(x, *vectors.chunk(2, dim=1))

    def ours_gated(x: torch.Tensor, branch: torch.Tensor, vectors: torch.Tensor) -> Any:
        return gated_norm(x, branch, *vectors.chunk(3, dim=1), eps=1e-6)

    def plain_gated(x: torch.Tensor, branch: torch.Tensor, vectors: torch.Tensor) -> Any:
        gate, scale, shift = vectors.chunk(3, dim=1)
        total = x + gate[:, None] * branch
        return total, normed(total, scale, shift)

    x, branch = (bench.draw(bench.batch, bench.tokens, bench.hidden) for _ in range(2))
    bench.compare("norm, modulated", ours, plain, [x, bench.draw(bench.batch, 2 * bench.hidden)])
    bench.compare("norm after a gate", ours_gated, plain_gated, [x, branch, bench.draw(bench.batch, 3 * bench.hidden)])


def gelu(bench: Bench) -> None:
    from fullshard.families.diffusion.kernels.biased_gelu import biased_gelu

    def plain(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.gelu(x + bias, approximate="tanh")

    wide = 4 * bench.hidden
    bench.compare(
        "GELU with a bias", biased_gelu, plain, [bench.draw(bench.batch, bench.tokens, wide), bench.draw(wide)]
    )


def attention(bench: Bench) -> None:
    """With the projections, whose cost depends on where queries, keys and values lie."""
    from fullshard.families.diffusion.kernels.packed_attention import packed_attention

    heads = (bench.heads, bench.width)

    def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        qkv = F.linear(x, weight, bias.detach())
        return packed_attention(qkv.unflatten(-1, (3, *heads)), bias)

    def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        projected = [F.linear(x, w, b) for w, b in zip(weight.chunk(3), bias.chunk(3), strict=True)]
        found = F.scaled_dot_product_attention(*(p.unflatten(-1, heads).transpose(1, 2) for p in projected))
        return found.transpose(1, 2)

    def ours_alone(qkv: torch.Tensor) -> torch.Tensor:
        return packed_attention(qkv)

    def plain_alone(qkv: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*(p.transpose(1, 2) for p in qkv.unbind(2))).transpose(1, 2)

    x = bench.draw(bench.batch, bench.tokens, bench.hidden)
    weight = (bench.draw(3 * bench.hidden, bench.hidden).detach() / bench.hidden**0.5).requires_grad_()
    bench.compare("attention", ours_alone, plain_alone, [bench.draw(bench.batch, bench.tokens, 3, *heads)])
    bench.row("attention with projections", ours, plain, [x, weight, bench.draw(3 * bench.hidden)])


def second_projection(bench: Bench) -> None:
    """The same product with its weights as they are and turned over, which turns the product of the gradient over."""
    wide = 4 * bench.hidden

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.t().contiguous()

    inputs = [bench.draw(bench.batch * bench.tokens, wide), bench.draw(bench.hidden, wide)]
    bench.row("second projection, turned over", ours, F.linear, inputs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    bench = Bench(tiny=parser.parse_args().tiny)
    torch.manual_seed(0)
    print("| part of a block | ours, ms | torch's, ms | ms of a step gained | off |\n|---|---|---|---|---|", flush=True)
    for part in (norms, gelu, attention, second_projection):
        part(bench)


if __name__ == "__main__":
    sys.exit(main())
