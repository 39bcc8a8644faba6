"""A training loop that a user might have, plain and with `fullshard.shard`, on models of several kinds.

The sharded one is sent to the rank pool by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

ROWS, STEPS = 8, 6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.tensor(0.7))  # FSDP cannot slice a scalar

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * torch.tanh(self.mix(x))


class Blocks(nn.Module):
    """Repeated blocks, a frozen first layer in bf16 and a buffer: several dtypes in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12).to(torch.bfloat16).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(12) for _ in range(3))
        self.head = nn.Linear(12, 3)
        self.register_buffer("shift", torch.linspace(-1, 1, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(x, self.first.weight.to(x.dtype), self.first.bias.to(x.dtype)) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(kind: str, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3))
    if kind == "frozen":
        return Blocks()
    from transformers import AutoModelForCausalLM, Qwen3Config

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "initializer_range": 0.2}
    return AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **heads, tie_word_embeddings=True))


def batch(kind: str, step: int) -> torch.Tensor:
    torch.manual_seed(100 + step)
    return torch.randint(61, (ROWS, 7)) if kind == "tied" else torch.randn(ROWS, 6)


def loss_of(kind: str, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    if kind == "tied":
        return model(input_ids=rows, labels=rows).loss
    return (model(rows) - rows[:, :3].cos()).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-2, eps=1e-4)


def ceiling(step: int) -> float:
    """Gradients are clipped in every second step: in the others a wrong scale shows."""
    return 0.5 if step % 2 else 1e6


def plain(kind: str, steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One process, no fullshard: the losses and the weights."""
    model = build(kind)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    losses = []
    for step in range(steps):
        loss = loss_of(kind, model, batch(kind, step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), ceiling(step))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def sharded(
    kind: str,
    *,
    steps: int = STEPS,
    folder: Path | None = None,
    save_after: int | None = None,
    seed_by_rank: bool = False,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same loop on this rank's share of the rows; continues from `folder`, and saves there after a step."""
    import fullshard
    from fullshard.dist import reduce

    world = fullshard.init(device="cpu")
    model = fullshard.shard(build(kind, seed=world.rank if seed_by_rank else 0), device="cpu", **options)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    begun = 0
    if folder is not None:
        objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
        begun = fullshard.load(folder, missing_ok=True, **objects).get("step", 0)
    losses = []
    for step in range(begun, steps):
        loss = loss_of(kind, model, batch(kind, step).chunk(world.size)[world.rank])
        loss.backward()
        fullshard.clip_grad_norm(model, ceiling(step))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(sum(reduce.gather_objects(float(loss.detach()))) / world.size)
        if step + 1 == save_after:
            fullshard.save(folder, model=model, optimizer=optimizer, step=step + 1, schedule=schedule)
            break
    return losses, weights(model)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    from fullshard.dist.shard import reshard
    from fullshard.dist.values import whole

    reshard(model)
    return {name: whole(p).clone() for name, p in model.named_parameters()}


def gradient_of_head(model: nn.Module) -> torch.Tensor:
    """The whole gradient of the head."""
    from fullshard.dist.values import whole

    return whole(model.head.weight.grad).clone()
