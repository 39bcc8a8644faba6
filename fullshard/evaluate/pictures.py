"""Images that the model makes as it is now: a grid with a row for each class or text, always from the same noise.

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
from fullshard.ops.denoising import Text, texts_of

_AT_ONCE = 8
"""So many latents become images together."""


class Pictures(Evaluation):
    """Makes images and keeps them as `pictures/samples-STEP.png` in the run folder."""

    classes: list[int] | None = None
    """A row for each of these labels; null: every class, or one row where the model has none."""
    texts: int = Field(8, ge=1)
    """Rows where the model takes texts: the first so many of the validation data."""
    per_class: int = Field(8, ge=1)
    """Images in a row."""
    steps: int = Field(32, ge=1)
    """From noise to an image."""
    method: Method = "heun"
    """euler asks the model once a step, heun twice, and needs fewer steps for the same."""
    guidance: float = Field(2.0, ge=0)
    """How much a label or a text counts: 1 is what the model learned, more is clearer and less varied."""
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
        if _takes_texts(model) and held_out is None:
            raise RecipeError(
                f"evaluate.parts: kind pictures makes images of the first {self.texts} texts of the validation data, "
                "and there is none. Give data.validation or data.holdout."
            )
        wrong = [label for label in self.classes or () if not 0 <= label < (denoiser.num_classes or 0)]
        if wrong:
            raise RecipeError(
                f"evaluate.parts: kind pictures asks for the class {wrong[0]}, and the model has "
                f"{denoiser.num_classes or 'no'} classes. Allowed: 0 to one less than there are."
            )

    def check_encoder(self, objective: Objective, model: nn.Module, encoder: Any) -> None:
        channels = _channels(model)
        if channels not in (1, 3) and "vae" not in objective.frozen() and getattr(encoder, "vae", None) is None:
            raise RecipeError(
                f"evaluate.parts: kind pictures shows images of 1 or 3 channels, and the model has {channels}: latents "
                "are no images. Name the VAE that makes images of them (data.encode.vae or objective.vae), or leave "
                "pictures out."
            )

    def run(self, inputs: EvaluationInputs) -> Findings:
        model: Any = inputs.model
        text, shape = self._texts(inputs) if _takes_texts(model) else (None, _shape(model))
        rows = list(self.classes if self.classes is not None else range(model.num_classes or 1))
        if text is not None:
            rows = list(range(len(text["mask"])))
        wanted = torch.tensor([row for row in rows for _ in range(self.per_class)])
        ranks, rank = reduce.place()
        # As many on every rank: who has one less makes the last one again.
        mine = torch.arange(rank, rank + ranks * -(-len(wanted) // ranks), ranks).clamp(max=len(wanted) - 1)
        chosen = wanted[mine].to(inputs.device)
        with torch.compiler.set_stance("force_eager"):
            images = sample(
                inputs.objective,
                model,
                chosen if model.num_classes is not None else None,
                mine.to(inputs.device),
                shape=shape,
                seed=self.seed,
                steps=self.steps,
                guidance=self.guidance,
                method=self.method,
                text=None if text is None else {name: part[chosen] for name, part in text.items()},
            )
            images = _decoded(images, inputs.aux.get("vae"))
        everyone = reduce.gather_rows(images)
        # Rank by rank; number n is the n-th // ranks-th of rank n % ranks.
        whole = everyone.reshape(ranks, -1, *images.shape[1:]).transpose(0, 1).flatten(0, 1)[: len(wanted)]
        if rank == 0:
            inputs.show("samples", whole, columns=self.per_class)
        return Findings()

    def _texts(self, inputs: EvaluationInputs) -> tuple[Text, tuple[int, ...]]:
        """The first texts of the validation data, on every rank, and the shape of an image there."""
        found: dict[int, dict[str, torch.Tensor]] = {}
        shape: tuple[int, ...] = ()
        seen = 0
        for batch in inputs.batches():
            shape = tuple(batch["images"].shape[1:])
            text = texts_of(inputs.model, batch)
            for row, number in enumerate(batch["sample_ids"].tolist()):
                if 0 <= number < self.texts:
                    found[number] = {name: part[row] for name, part in text.items()}
            seen += len(batch["sample_ids"]) * reduce.place()[0]
            if seen >= self.texts:  # a batch holds as many on every rank
                break
        for share in reduce.gather_objects(found):
            found |= share
        rows = [found[number] for number in sorted(found)]
        parts = {name: torch.stack([row[name] for row in rows]).to(inputs.device) for name in rows[0]}
        vae: Any = inputs.objective.frozen().get("vae")
        return parts, shape if vae is None else vae.latent_shape(shape)


def _takes_texts(model: nn.Module) -> bool:
    return getattr(model, "text_width", None) is not None


def _channels(model: Any) -> int:
    """Flux counts the pixels of a patch as channels."""
    return int(getattr(model, "image_channels", model.config.in_channels))


def _shape(model: Any) -> tuple[int, ...]:
    size = model.config.sample_size
    return (_channels(model), *((size, size) if isinstance(size, int) else size))


@torch.no_grad()
def _decoded(images: torch.Tensor, vae: Any) -> torch.Tensor:
    """What a VAE that is part of the run makes of latents, on all ranks together; others are decoded where they are
    shown."""
    return images if vae is None else torch.cat([vae.decode_latents(some) for some in images.split(_AT_ONCE)])


__all__ = ["Pictures"]
