"""The share of images that a classifier of the user's takes for the class that the model was asked for.

The ranks share the images out and run every forward pass together. Must not know FSDP or how the model was trained.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, PrivateAttr
from torch import nn

from fullshard.config.user_code import load_callable
from fullshard.contracts.evaluation import Evaluation, EvaluationInputs, Findings
from fullshard.contracts.objective import Numbers, Objective
from fullshard.dist import reduce
from fullshard.errors import RecipeError
from fullshard.families.diffusion.sampling.image_batches import FILLER, Way, make_images
from fullshard.families.diffusion.sampling.image_callbacks import (
    as_given,
    guidance_of,
    kept_open,
    require_denoiser,
    require_images,
    takes_texts,
    trial,
)
from fullshard.families.diffusion.sampling.sampler import Method

WHERE = "evaluate.parts: recognition.classifier"


class Recognition(Evaluation):
    """How often a classifier finds the class in an image that it was made for: `recognised`, from 0 to 1."""

    numbers: ClassVar[Numbers | None] = {"recognised": "max"}

    classifier: str
    """What turns images (B, C, H, W) into logits (B, classes) or labels (B,): path.py:Name or
    my_package.my_module.Name of a function, of a torch module, or of a class that makes one without arguments."""
    pixels: Literal["float", "uint8"] = "float"
    """What the classifier takes: numbers from 0 to 1, or bytes."""
    classes: list[int] | None = Field(None, min_length=1)
    """Which labels are asked for; null: every class."""
    per_class: int = Field(10, ge=1)
    """Images of each."""
    batch_size: int = Field(64, ge=1)
    """Images that each rank makes at once."""
    steps: int = Field(32, ge=1)
    """From noise to an image."""
    method: Method = "heun"
    """euler asks the model once a step, heun twice, and needs fewer steps for the same."""
    guidance: float | None = Field(None, ge=0)
    """How much a label counts: 1 is what the model learned, more is clearer and less varied; null: 2, and 1 for a model
    that saw all labels (objective.label_drop = 0)."""
    seed: int = 0
    """Decides the noise."""

    _encoder: Any = PrivateAttr()
    """What takes the data's scaling off images."""
    _judge: Any = PrivateAttr(None)

    def check(self, objective: Objective, model: nn.Module, held_out: Any) -> None:
        denoiser: Any = model
        require_denoiser("recognition", objective, model)
        if takes_texts(model):
            raise RecipeError(
                "evaluate.parts: kind recognition asks for images by their class, and the model is conditioned on "
                "texts. Leave it out; fid takes texts."
            )
        if denoiser.num_classes is None:
            raise RecipeError(
                "evaluate.parts: kind recognition asks for images of a class, and the model has none. Set "
                "model.classes, or leave it out."
            )
        self._guidance(objective, model)
        if wrong := [label for label in self.classes or () if not 0 <= label < denoiser.num_classes]:
            raise RecipeError(
                f"evaluate.parts: kind recognition asks for the class {wrong[0]}, and the model has "
                f"{denoiser.num_classes} classes. Allowed: 0 to {denoiser.num_classes - 1}."
            )

    def _guidance(self, objective: Objective, model: Any) -> float:
        where = "evaluate.parts: recognition.guidance"
        return guidance_of(model, objective, self.guidance, usual=2.0, where=where)

    def check_encoder(self, objective: Objective, model: nn.Module, encoder: Any) -> None:
        self._encoder = encoder
        self._judge = load_callable(self.classifier, where=WHERE)
        if shape := require_images("recognition", objective, model, encoder):
            self._labels_in(trial(self._judge, shape, WHERE, as_bytes=self.pixels == "uint8"), 2)

    @torch.no_grad()
    def run(self, inputs: EvaluationInputs) -> Findings:
        model: Any = inputs.model
        judge = self._judge
        if isinstance(judge, nn.Module):
            judge.to(inputs.device).eval()
        asked = self.classes if self.classes is not None else range(model.num_classes)
        wanted = torch.tensor([label for label in asked for _ in range(self.per_class)])
        ranks, _ = reduce.place()
        found = torch.zeros(2, dtype=torch.float64, device=inputs.device)
        with kept_open(self._encoder), inputs.bar(-(-len(wanted) // (ranks * self.batch_size))) as bar:
            for numbers, images in make_images(
                inputs.objective,
                model,
                wanted,
                Way(self.steps, self.method, self._guidance(inputs.objective, model), self.seed),
                batch=self.batch_size,
                place=reduce.place(),
                device=inputs.device,
                vae=inputs.aux.get("vae"),
            ):
                there = numbers != FILLER
                if there.any():
                    shown = self._encoder.shown(images[there.to(images.device)])
                    given = as_given(shown, as_bytes=self.pixels == "uint8")
                    labels = self._labels_in(judge(given), len(given))
                    right = (labels == wanted[numbers[there]]).sum()
                    found += torch.tensor([int(right), len(given)], device=inputs.device)
                bar.advance()
        right_all, count = inputs.sum_over_ranks(found).tolist()
        return Findings({"recognised": right_all / count})

    def _labels_in(self, said: Any, count: int) -> torch.Tensor:
        """The label of each image, from labels or from logits, of torch or of NumPy."""
        found = said.detach().cpu() if isinstance(said, torch.Tensor) else torch.from_numpy(np.asarray(said))
        if found.dim() == 2 and len(found) == count and found.shape[1] > 1:
            return found.argmax(dim=1)
        if found.dim() == 1 and len(found) == count and not found.is_floating_point():
            return found.long()
        raise RecipeError(
            f"{WHERE} = {self.classifier!r} gave {str(found.dtype).removeprefix('torch.')} of shape "
            f"{list(found.shape)} for {count} images. It must give a whole number for each, or a row of logits."
        )


__all__ = ["Recognition"]
