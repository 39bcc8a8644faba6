"""Muon for the matrices inside blocks, AdamW for everything else: embeddings, heads, vectors, convolutions.

Must not know how parameters are sharded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fullshard.contracts.optimizer import Optimizer, matching_names
from fullshard.errors import RecipeError
from fullshard.optim.adamw import Decay

if TYPE_CHECKING:
    import torch
    from torch import nn


class Muon(Optimizer):
    """Momentum, orthogonalised by a few Newton-Schulz iterations in bf16 on whole matrices."""

    matrix_lr: float | None = Field(None, gt=0)
    """The learning rate of matrices, which the schedule also multiplies; null: optimizer.lr."""
    adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How the shape of a matrix scales its learning rate. match_rms_adamw: updates as large as AdamW's, so that a rate
    tuned for AdamW still fits; original: needs rates near 0.02."""
    matrices: list[str] | None = Field(None, min_length=1)
    """Patterns of the names of parameters that Muon trains; null: matrices in numbered blocks, except embeddings."""
    momentum: Decay = 0.95
    """Decay rate of the momentum."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    iterations: int = Field(5, ge=1, lt=100)
    """Newton-Schulz iterations."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment, for all other parameters."""
    eps: float = Field(1e-8, gt=0)
    """Added to the square root of the second moment."""

    def open(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        from fullshard.optim.muon_update import SlicedMuon

        trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
        taken = self.taken([(name, p.dim()) for name, p in trainable])
        matrices = self.groups([(name, p) for name, p in trainable if name in taken])
        for group in matrices:
            group["factor"] = 1.0 if "lr" in group else (self.matrix_lr or self.lr) / self.lr
        return SlicedMuon(self, matrices, self.groups([(name, p) for name, p in trainable if name not in taken]))

    def taken(self, trainable: list[tuple[str, int]]) -> set[str]:
        """The names of the parameters that Muon trains, given all names and their number of dimensions."""
        matrices = [name for name, dims in trainable if dims == 2]
        if self.matrices is None:
            in_blocks = [name for name in matrices if any(part.isdecimal() for part in name.split("."))]
            found = {name for name in in_blocks if "embed" not in name}
            if not found:
                raise RecipeError(
                    "optimizer.kind = muon: no trained matrix is in a numbered block. Name some in optimizer.matrices "
                    f"({', '.join(matrices[:3])}), or use optimizer.kind: adamw."
                )
            return found
        found = set()
        for index, pattern in enumerate(self.matrices):
            where = f"optimizer.matrices[{index}] = {pattern!r}"
            found.update(matching_names(pattern, matrices, where=where, noun="trained matrix"))
        return found


__all__ = ["Muon"]
