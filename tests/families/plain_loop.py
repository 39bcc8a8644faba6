"""A plain loop in one process, one record at a time, for models that read media: what a run is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy


def trained_plainly(
    model: Any,
    inputs: Sequence[dict[str, Any]],
    *,
    steps: int,
    batch: int,
    frozen: tuple[str, ...],
    rates: Mapping[str, float] | None,
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step; `rates` are the learning rates of parameters by the start of their name."""
    model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not name.startswith(frozen))
    groups: dict[tuple[float, bool], list[Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            lr = next((rate for start, rate in (rates or {}).items() if name.startswith(start)), 1e-3)
            groups.setdefault((lr, parameter.dim() >= 2), []).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": g, "lr": lr, "weight_decay": 0.1 if decays else 0.0} for (lr, decays), g in groups.items()],
        betas=(0.9, 0.95),
    )
    trained = [parameter for group in groups.values() for parameter in group]
    found = []
    for step in range(steps):
        rows = [inputs[(step * batch + at) % len(inputs)] for at in range(batch)]
        total = sum(int((row["labels"] != -100).sum()) for row in rows)
        whole = 0.0
        for row in rows:
            labels = row["labels"]
            logits = model(**{k: v for k, v in row.items() if k != "labels"}).logits
            loss = cross_entropy(logits[0, :-1].float(), labels[0, 1:], ignore_index=-100, reduction="sum") / total
            loss.backward()
            whole += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(trained, 1.0))
        optimizer.step()
        optimizer.zero_grad()
        found.append((whole, norm))
    return found
