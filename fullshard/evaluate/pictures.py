"""Images that the model makes as it is now: a grid with a row for each class, always from the same noise.

The ranks share the images out and run every forward pass together. Must not know FSDP or how the model was trained.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import nn

from fullshard.diffusion.sampler import Method, sample
from fullshard.dist import reduce
from fullshard.errors import RecipeError
from fullshard.evaluate.base import Evaluation, EvaluationInputs, Findings
from fullshard.objectives.base import Objective


class Pictures(Evaluation):
    """Makes images and keeps them as `pictures/samples-STEP.png` in the run folder."""

    classes: list[int] | None = None
    """A row for each of these labels; null: every class, or one row where the model has none."""
    per_class: int = Field(8, ge=1)
    """Images in a row."""
    steps: int = Field(32, ge=1)
    """From noise to an image."""
    method: Method = "heun"
    """euler asks the model once a step, heun twice, and needs fewer steps for the same."""
    guidance: float = Field(2.0, ge=0)
    """How much a label counts: 1 is what the model learned, more is clearer and less varied."""
    seed: int = 0
    """Decides the noise."""

    def gives(self, objective: Objective) -> tuple[str, ...] | None:
        return ()

    def check(self, objective: Objective, model: nn.Module, held_out: Any) -> None:
        denoiser: Any = model
        if not hasattr(objective, "slope") or not hasattr(model, "denoise"):
            raise RecipeError(
                f"evaluate.parts: kind pictures needs an objective that images are made by (flow_matching, ddpm), and "
                f"objective.kind is {objective.kind()}. Leave it out."
            )
        if (channels := denoiser.config.in_channels) not in (1, 3):
            raise RecipeError(
                f"evaluate.parts: kind pictures shows images of 1 or 3 channels, and the model has {channels}: latents "
                "are no images. Leave it out."
            )
        wrong = [label for label in self.classes or () if not 0 <= label < (denoiser.num_classes or 0)]
        if wrong:
            raise RecipeError(
                f"evaluate.parts: kind pictures asks for the class {wrong[0]}, and the model has "
                f"{denoiser.num_classes or 'no'} classes. Allowed: 0 to one less than there are."
            )

    def run(self, inputs: EvaluationInputs) -> Findings:
        model: Any = inputs.model
        rows = self.classes if self.classes is not None else range(model.num_classes or 1)
        wanted = torch.tensor([label for label in rows for _ in range(self.per_class)])
        ranks, rank = reduce.place()
        # As many on every rank: who has one less makes the last one again.
        mine = torch.arange(rank, rank + ranks * -(-len(wanted) // ranks), ranks).clamp(max=len(wanted) - 1)
        labels = wanted[mine].to(inputs.device) if model.num_classes is not None else None
        size = model.config.sample_size
        sides = (size, size) if isinstance(size, int) else tuple(size)
        with torch.compiler.set_stance("force_eager"):
            images = sample(
                inputs.objective,
                model,
                labels,
                mine.to(inputs.device),
                shape=(model.config.in_channels, *sides),
                seed=self.seed,
                steps=self.steps,
                guidance=self.guidance,
                method=self.method,
            )
        everyone = reduce.gather_rows(images)
        # Rank by rank; number n is the n-th // ranks-th of rank n % ranks.
        whole = everyone.reshape(ranks, -1, *images.shape[1:]).transpose(0, 1).flatten(0, 1)[: len(wanted)]
        if rank == 0:
            inputs.show("samples", whole, columns=self.per_class)
        return Findings()


__all__ = ["Pictures"]
