"""A small diffusion transformer as papers write it, and what trains it: a family, an objective. Nothing in the module
knows of precision: the sinusoid of the timestep is fp32, the layers behind it are whatever they were cast to."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import huber_loss, silu

from fullshard.contracts.model import Family, Weights
from fullshard.contracts.objective import Batch, Objective, Terms

WIDTH, CHANNELS, FREQUENCIES, LONGEST, STEPS = 32, 8, 64, 64, 1000


def sinusoid(t: torch.Tensor) -> torch.Tensor:
    """Of a timestep, integer or not, in fp32."""
    half = FREQUENCIES // 2
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    angles = t[:, None].float() * frequencies[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class TimestepEmbedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(sinusoid(t))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulate = nn.Linear(WIDTH, 2 * WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift, scale = self.modulate(silu(c))[:, None].chunk(2, dim=-1)
        out: torch.Tensor = x + self.out(silu(self.mix(self.norm(x) * (1 + scale) + shift)))
        return out


class TimedBlock(Block):
    """A block that embeds the timestep by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.t_embedder = TimestepEmbedder()

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return super().forward(x, self.t_embedder(t))


class Denoiser(nn.Module):
    """Predicts the noise in `x` at timestep `t`."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder = nn.Linear(CHANNELS, WIDTH)
        self.position = nn.Parameter(torch.randn(LONGEST, WIDTH) / 10)
        self.t_embedder = TimestepEmbedder()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.final_layer = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        c = self.t_embedder(t)
        x = self.x_embedder(x)
        x += self.position[: x.shape[1]]
        for block in self.blocks:
            x = block(x, c)
        out: torch.Tensor = self.final_layer(x)
        return out


class InRoot(nn.Module):
    """The same with the sinusoid in the model's own forward, under another name of the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder = nn.Linear(CHANNELS, WIDTH)
        self.t_embedder = nn.Sequential(nn.Linear(FREQUENCIES, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.final_layer = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        c = self.t_embedder(sinusoid(timesteps))
        x = self.x_embedder(x)
        for block in self.blocks:
            x = block(x, c)
        out: torch.Tensor = self.final_layer(x)
        return out


class InBlocks(nn.Module):
    """The same with the timestep embedded in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder = nn.Linear(CHANNELS, WIDTH)
        self.blocks = nn.ModuleList(TimedBlock() for _ in range(3))
        self.final_layer = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        x = self.x_embedder(x)
        for block in self.blocks:
            x = block(x, t)
        out: torch.Tensor = self.final_layer(x)
        return out


class Idle(Denoiser):
    """The first one with a layer that nothing runs."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)


MODULES: dict[str, type[nn.Module]] = {
    "embedder": Denoiser,
    "in_root": InRoot,
    "in_blocks": InBlocks,
    "idle": Idle,
}


def plain(name: str) -> nn.Module:
    """The module with fixed values, by torch alone."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        return MODULES[name]()


class Denoisers(Family):
    """The modules above with fixed values: on meta, read in slices."""

    name: str = "embedder"

    def build(self, *, processor: Any) -> nn.Module:
        with init_empty_weights(include_buffers=False):
            return MODULES[self.name]()

    def weights(self, module: nn.Module) -> Weights | None:
        state: dict[str, torch.Tensor] = plain(self.name).state_dict()

        class Stored:
            def names(self) -> set[str]:
                return set(state)

            def read(self, name: str, start: int, stop: int) -> torch.Tensor:
                return state[name][start:stop]

        return Stored()

    def export(
        self, module: nn.Module, tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, *, processor: Any
    ) -> None:
        folder.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in tensors}, folder / "denoiser.safetensors")
        (folder / "denoiser.json").write_text(json.dumps({"name": self.name}))


def clean(ids: torch.Tensor) -> torch.Tensor:
    """What tokens stand for: points on circles."""
    angles = ids[..., None] * torch.tensor([0.1, 0.3, 0.7, 1.1], device=ids.device)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def noisy(x: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    share = (t.float() / STEPS)[:, None, None]
    mixed: torch.Tensor = (1 - share) * x + share * noise
    return mixed


class Denoise(Objective):
    """Mean squared error of the noise, at a timestep for each sample."""

    needs: ClassVar[tuple[str, ...]] = ("input_ids",)
    integers: bool = False
    """Timesteps as integers."""
    by_name: bool = False
    """The timestep as a keyword argument."""

    def count(self, batch: Batch) -> int:
        return int(batch["input_ids"].numel() * CHANNELS)

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        x = clean(batch["input_ids"])
        # Each sample at the timesteps of its own tokens, so that no two runs differ in what they draw.
        t = (batch["input_ids"].sum(-1) * 37 % STEPS).float() + (0.0 if self.integers else 0.5)
        noise = torch.cos(17.0 * x + t[:, None, None])
        inputs = noisy(x, noise, t), t.long() if self.integers else t
        predicted = model(inputs[0], t=inputs[1]) if self.by_name else model(*inputs)
        return Terms(huber_loss(predicted, noise, reduction="sum"))
