"""What evaluations that make images share: the sampler's settings. Must not know what the images are for."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from fullshard.contracts.evaluation import Evaluation
from fullshard.families.diffusion.sampling.conditioning import guidance_of
from fullshard.families.diffusion.sampling.image_batches import SamplerSettings
from fullshard.families.diffusion.sampling.sampler import Method


class MakesImages(Evaluation):
    """An evaluation that samples images."""

    steps: int = Field(32, ge=1)
    """Sampling steps from noise to image."""
    method: Method = "heun"
    """euler runs the model once per step; heun runs it twice, and needs fewer steps for the same quality."""
    guidance: float | None = Field(None, ge=0)
    """The weight of a label or text: 1 is what the model learned, more is clearer and less varied; null: 2, and 1 for a
    model without labels and texts, one that takes its guidance as an input (Flux with guidance_embeds), and one from
    scratch that never saw them dropped (objective.label_drop = 0)."""
    seed: int = 0
    """Seed of the noise."""

    def sampler(self, objective: Any, model: Any) -> SamplerSettings:
        """With the guidance in force; raises RecipeError for an impossible one."""
        where = f"evaluate.parts: {self.kind()}.guidance"
        guidance = guidance_of(model, objective, self.guidance, usual=2.0, where=where)
        return SamplerSettings(self.steps, self.method, guidance, self.seed)
