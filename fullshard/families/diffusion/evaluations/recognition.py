"""The share of images in which the user's classifier recognises the class that the model was asked for.

The ranks share the images out and run every forward pass together. Must not know FSDP or how the model was trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PrivateAttr

from fullshard.contracts.evaluation import EvaluationInputs, Findings
from fullshard.contracts.no_grad import no_grad
from fullshard.contracts.objective import Numbers, Objective
from fullshard.errors import RecipeError
from fullshard.families.diffusion.evaluations.base import MakesImages
from fullshard.families.diffusion.evaluations.image_callbacks import (
    as_pixels,
    require_denoiser,
    require_images,
    trial,
)
from fullshard.families.diffusion.evaluations.user_code import load_callable
from fullshard.families.diffusion.sampling.conditioning import kept_open, takes_texts
from fullshard.families.diffusion.sampling.image_batches import FILLER, make_images

if TYPE_CHECKING:
    import torch
    from torch import nn

WHERE = "evaluate.parts: recognition.classifier"


class Recognition(MakesImages):
    """How often a classifier finds the class that an image was made for: `recognised`, from 0 to 1."""

    numbers: ClassVar[Numbers | None] = {"recognised": "max"}

    classifier: str
    """Turns images (B, C, H, W) into logits (B, classes) or labels (B,): path.py:Name or
    my_package.my_module.Name of a function, of a torch module, or of a class that makes one without arguments."""
    pixels: Literal["float", "uint8"] = "float"
    """What the classifier takes: floats from 0 to 1, or uint8."""
    classes: list[int] | None = Field(None, min_length=1)
    """Labels to make images for; null: every class."""
    per_class: int = Field(10, ge=1)
    """Images per class."""
    batch_size: int = Field(64, ge=1)
    """Images that each rank makes at once."""

    _classifier: Any = PrivateAttr(None)

    def check(self, objective: Objective, model: nn.Module, held_out: Any) -> None:
        denoiser: Any = model
        require_denoiser("recognition", objective, model)
        if takes_texts(model):
            raise RecipeError(
                "evaluate.parts: kind recognition makes images for classes, but the model is conditioned on texts. "
                "Leave it out; fid takes texts."
            )
        if denoiser.num_classes is None:
            raise RecipeError(
                "evaluate.parts: kind recognition makes images for classes, but the model has no classes. Set "
                "model.classes, or leave it out."
            )
        self.sampler(objective, model)
        if wrong := [label for label in self.classes or () if not 0 <= label < denoiser.num_classes]:
            raise RecipeError(
                f"evaluate.parts: kind recognition asks for the class {wrong[0]}, but the model has "
                f"{denoiser.num_classes} classes. Allowed: 0 to {denoiser.num_classes - 1}."
            )

    def check_encoder(self, objective: Objective, model: nn.Module, encoder: Any) -> None:
        self._classifier = load_callable(self.classifier, where=WHERE)
        if shape := require_images("recognition", objective, model, encoder):
            self._labels_in(trial(self._classifier, shape, WHERE, as_bytes=self.pixels == "uint8"), 2)

    @no_grad
    def run(self, inputs: EvaluationInputs) -> Findings:
        import torch
        from torch import nn

        from fullshard.dist import reduce

        model: Any = inputs.model
        if isinstance(self._classifier, nn.Module):
            self._classifier.to(inputs.device).eval()
        asked = self.classes if self.classes is not None else range(model.num_classes)
        wanted = torch.tensor([label for label in asked for _ in range(self.per_class)])
        ranks, _ = reduce.place()
        found = torch.zeros(2, dtype=torch.float64, device=inputs.device)
        with kept_open(inputs.collator), inputs.bar(-(-len(wanted) // (ranks * self.batch_size))) as bar:
            for numbers, images in make_images(
                inputs.objective,
                model,
                wanted,
                self.sampler(inputs.objective, model),
                batch=self.batch_size,
                place=reduce.place(),
                device=inputs.device,
                vae=inputs.aux.get("vae"),
            ):
                there = numbers != FILLER
                if there.any():
                    shown = inputs.collator.decode(images[there.to(images.device)])
                    given = as_pixels(shown, as_bytes=self.pixels == "uint8")
                    labels = self._labels_in(self._classifier(given), len(given))
                    right = (labels == wanted[numbers[there]]).sum()
                    found += torch.tensor([int(right), len(given)], device=inputs.device)
                bar.advance()
        right_all, count = inputs.sum_over_ranks(found).tolist()
        return Findings({"recognised": right_all / count})

    def _labels_in(self, said: Any, count: int) -> torch.Tensor:
        """The label of each image, from labels or logits, of torch or NumPy."""
        import torch

        found = said.detach().cpu() if isinstance(said, torch.Tensor) else torch.from_numpy(np.asarray(said))
        if found.dim() == 2 and len(found) == count and found.shape[1] > 1:
            return found.argmax(dim=1)
        if found.dim() == 1 and len(found) == count and not found.is_floating_point():
            return found.long()
        raise RecipeError(
            f"{WHERE} = {self.classifier!r} returned {str(found.dtype).removeprefix('torch.')} of shape "
            f"{list(found.shape)} for {count} images. It must return an integer or a row of logits for each."
        )


__all__ = ["Recognition"]
