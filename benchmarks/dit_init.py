"""Which first values a diffusion transformer learns its classes from fastest, on the real digits.

    python benchmarks/dit_init.py --seeds 0 1 --steps 200 400 600

One process, a plain PyTorch loop and our own loss; only the first values differ. After each number of steps a support
vector classifier, which has learned the real digits, reads samples of the model as it is, without averaged weights.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.digits import CLASSES, real

SHAPE: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 1,
    "out_channels": 1,
    "patch_size": 2,
    "num_layers": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 24,
}


def tables(model: nn.Module) -> list[nn.Embedding]:
    return [part for part in model.modules() if isinstance(part, nn.Embedding)]


def ours(model: nn.Module) -> None:
    from fullshard.families.diffusion.denoiser.initial_weights import initialise

    initialise(model)


@torch.no_grad()
def paper(model: nn.Module) -> None:
    """As the code of the DiT paper: labels and the two layers for the time from N(0, 0.02), other layers Xavier, gates
    and the last layer zero."""
    ours(model)
    for table in tables(model):
        nn.init.normal_(table.weight, std=0.02)
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear) and "timestep_embedder" in name:
            nn.init.normal_(part.weight, std=0.02)
        if isinstance(part, nn.Conv2d):
            nn.init.xavier_uniform_(part.weight.view(len(part.weight), -1))
            nn.init.zeros_(part.bias)


@torch.no_grad()
def narrow_labels(model: nn.Module) -> None:
    """As `ours`, with the paper's labels: N(0, 0.02) instead of N(0, 1)."""
    ours(model)
    for table in tables(model):
        nn.init.normal_(table.weight, std=0.02)


@torch.no_grad()
def torch_own(model: nn.Module) -> None:
    """What torch gives every layer by itself, as diffusers leaves it; gates zero."""
    for part in model.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    for name, part in model.named_modules():
        if name.endswith("norm1.linear"):
            for parameter in part.parameters():
                parameter.zero_()


INITS = {"ours": ours, "paper": paper, "narrow_labels": narrow_labels, "torch_own": torch_own}


def build(init: str, seed: int) -> Any:
    from fullshard.families.diffusion.models.diffusers import Diffusers

    model = Diffusers(architecture="dit", classes=CLASSES, overrides=SHAPE).build(processor=None)
    for name, parameter in list(model.named_parameters()):
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(torch.empty_like(parameter, device="cpu")))
    torch.manual_seed(seed)
    INITS[init](model)
    return model


def read(model: Any, reader: Any, *, guidance: float, each: int) -> float:
    """The share of samples that the classifier reads as the class asked for."""
    from fullshard.families.diffusion.objectives.flow_matching import FlowMatching
    from fullshard.families.diffusion.sampling.sampler import sample

    labels = torch.arange(CLASSES).repeat_interleave(each)
    numbers = torch.arange(len(labels))
    how = {"shape": (1, 8, 8), "seed": 1, "steps": 12, "guidance": guidance, "method": "heun"}
    images = sample(FlowMatching(), model.eval(), labels, numbers, **how)
    model.train()
    return float((reader.predict(images.clamp(-1, 1).flatten(1).numpy()) == labels.numpy()).mean())


def train(init: str, seed: int, steps: list[int], *, lr: float, batch: int, each: int) -> None:
    from sklearn.svm import SVC  # type: ignore[import-untyped, unused-ignore]

    from fullshard.families.diffusion.objectives.flow_matching import FlowMatching

    pixels, classes = real("train")
    reader = SVC(C=10).fit(pixels, classes)
    images, labels = torch.from_numpy(pixels).reshape(-1, 1, 8, 8), torch.from_numpy(classes)
    model, objective = build(init, seed), FlowMatching(time="logit_normal")
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0)
    draw, losses = np.random.default_rng(seed), []
    for step in range(1, max(steps) + 1):
        rows = torch.from_numpy(draw.integers(len(images), size=batch))
        draws = torch.from_numpy(draw.integers(2**62, size=batch))
        given = {"images": images[rows], "label": labels[rows], "draws": draws, "sample_ids": rows}
        for group in optimizer.param_groups:
            group["lr"] = lr * min(step / 50, 1)
        loss = objective.loss(model, given, {}).loss_sum / batch
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if step in steps:
            found = [read(model, reader, guidance=guidance, each=each) for guidance in (1.0, 2.0)]
            late = float(np.mean(losses[-50:]))
            print(f"| {init} | {seed} | {step} | {late:.4f} | {found[0]:.1%} | {found[1]:.1%} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inits", nargs="*", default=list(INITS), choices=list(INITS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--steps", type=int, nargs="*", default=[200, 400, 600])
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--each", type=int, default=30)
    options = parser.parse_args()
    print("| first values | seed | step | loss, mean of 50 steps | recognised, guidance 1 | guidance 2 |")
    print("|---|---|---|---|---|---|")
    for init in options.inits:
        for seed in options.seeds:
            train(init, seed, options.steps, lr=options.lr, batch=options.batch, each=options.each)
    return 0


if __name__ == "__main__":
    sys.exit(main())
