"""Depthwise convolutions in fp16 on shapes that change with every call: cuDNN, which torch chooses, beside torch's own
kernel, which towers use (fullshard/multimodal/depthwise.py).

    python benchmarks/depthwise.py

The layers of Phi-4-multimodal's audio tower: 24 in its blocks, two where it reads frames. Forward and backward, one
number of frames for all layers of a call, as in a training step.
"""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from fullshard.multimodal.depthwise import use_own_kernel

CLIPS, BLOCKS, CALLS = 56, 24, 8


def layers() -> nn.ModuleDict:
    made = {
        "blocks": nn.Conv1d(1024, 1024, 3, padding=2, groups=1024),
        "frames": nn.Conv2d(1024, 1024, 3, stride=2, padding=1, groups=1024),
    }
    return nn.ModuleDict(made).to("cuda", torch.float16)


def calls() -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs of both layers; no two calls have the same number of frames."""
    draw = random.Random(0)
    for frames in draw.sample(range(300, 800), CALLS):
        shapes = (CLIPS, 1024, frames // 8), (CLIPS, 1024, frames // 2, 40)
        yield tuple(torch.randn(shape, device="cuda", dtype=torch.float16, requires_grad=True) for shape in shapes)


def run(model: nn.ModuleDict, blocks: Tensor, frames: Tensor) -> list[Tensor]:
    outputs = [model["blocks"](blocks) for _ in range(BLOCKS)] + [model["frames"](frames)]
    torch.autograd.backward([output.float().sum() for output in outputs])
    return [outputs[0], outputs[-1], blocks.grad, frames.grad]


def main() -> None:
    theirs = layers()
    own = copy.deepcopy(theirs)
    use_own_kernel(own, device="cuda", compute=torch.float16)
    seconds: dict[str, list[float]] = {"cuDNN": [], "torch's own": []}
    apart = 0.0
    for inputs in calls():
        found = []
        for name, model in zip(seconds, (theirs, own), strict=True):
            fresh = [tensor.detach().requires_grad_() for tensor in inputs]
            torch.cuda.synchronize()
            begun = time.perf_counter()
            found.append(run(model, *fresh))
            torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - begun)
        for one, other in zip(*found, strict=True):
            apart = max(apart, ((one - other).abs().max() / one.abs().max()).item())
    print("| kernel | median ms of a call with a new shape |\n|---|---|")
    for name, taken in seconds.items():
        print(f"| {name} | {1000 * sorted(taken[2:])[len(taken[2:]) // 2]:.1f} |")
    print(f"largest difference, relative to the largest value: {apart:.1e}")


if __name__ == "__main__":
    main()
