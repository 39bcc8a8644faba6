"""FID: the Fréchet distance between held-out images and images of the model, in features of the user's extractor.

torchmetrics computes it from sums over all ranks, to which each rank adds its share of the images. Must not know FSDP
or how the model was trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PrivateAttr

from fullshard.contracts.evaluation import EvaluationInputs, Findings
from fullshard.contracts.no_grad import no_grad
from fullshard.contracts.objective import Batch, Numbers, Objective
from fullshard.errors import RecipeError, missing_package
from fullshard.families.diffusion.denoiser.batch_inputs import texts_of
from fullshard.families.diffusion.evaluations.base import MakesImages
from fullshard.families.diffusion.evaluations.image_callbacks import (
    as_pixels,
    require_denoiser,
    require_images,
    trial,
)
from fullshard.families.diffusion.evaluations.user_code import load_callable
from fullshard.families.diffusion.sampling.conditioning import kept_open, shape_of, takes_texts
from fullshard.families.diffusion.sampling.image_batches import FILLER, Shape, make_batch, make_images

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fullshard.families.diffusion.evaluations.feature_extractor import Extractor

WHERE = "evaluate.parts: fid.extractor"


class Fid(MakesImages):
    """How far the model's images are from held-out ones: `fid`, lower is better."""

    numbers: ClassVar[Numbers | None] = {"fid": "min"}
    needs_held_out: ClassVar[bool] = True

    extractor: str
    """Turns images (B, C, H, W) into features (B, N): path.py:Name or my_package.my_module.Name of a torch module, of a
    class that makes one without arguments, or of a function."""
    pixels: Literal["float", "uint8"] = "float"
    """What the extractor takes: floats from 0 to 1, or uint8."""
    images: int = Field(1000, ge=2)
    """How many images are made, with the classes or texts of the validation data."""
    batch_size: int = Field(64, ge=1)
    """Images that each rank makes at once."""
    guidance: float = Field(1.0, ge=0)  # type: ignore[assignment]
    """The weight of a label or text: 1 is what the model learned."""

    _extractor: Extractor | None = PrivateAttr(None)
    _real: _Real | None = PrivateAttr(None)

    def check(self, objective: Objective, model: nn.Module, held_out: Any) -> None:
        _metric_class()
        require_denoiser("fid", objective, model)
        self.sampler(objective, model)
        if held_out is None or len(held_out.chosen) < 2:
            raise RecipeError(
                "evaluate.parts: kind fid compares with held-out images, at least 2. Give data.validation, or "
                "data.holdout above 0."
            )

    def check_encoder(self, objective: Objective, model: nn.Module, encoder: Any) -> None:
        if shape := require_images("fid", objective, model, encoder):
            self._open(shape)

    @no_grad
    def run(self, inputs: EvaluationInputs) -> Findings:
        with kept_open(inputs.collator):
            extractor = self._extractor or self._open(self._shape(inputs))
            metric = _metric_class()(extractor, sync_on_compute=False).to(inputs.device)
            # The held-out images are the same at every validation.
            if self._real is None or self._real.batches != inputs.batches:
                with inputs.bar(inputs.num_batches) as bar:
                    self._real = self._look_at_real(metric, inputs, bar)
            look = self._look_at_texts if takes_texts(inputs.model) else self._look_at_made
            look(metric, inputs)
        for name, value in (self._real.sums | _sums(metric, "fake", inputs)).items():
            setattr(metric, name, value)
        return Findings({"fid": float(metric.compute())})

    def _look_at_real(self, metric: Any, inputs: EvaluationInputs, bar: Any) -> _Real:
        import torch

        from fullshard.dist.gather import gather_uneven

        labels = []
        for batch in inputs.batches():
            there = batch["sample_ids"] >= 0
            metric.update(self._for_extractor(batch["images"][there].to(inputs.device), inputs), real=True)
            labels.append(torch.stack([batch["sample_ids"][there], batch["label"][there]], dim=1))
            bar.advance()
        everyone = gather_uneven(torch.cat(labels).to(inputs.device)).cpu()
        # In the order of the data, which does not depend on the ranks.
        return _Real(inputs.batches, _sums(metric, "real", inputs), everyone[everyone[:, 0].argsort(), 1])

    def _look_at_made(self, metric: Any, inputs: EvaluationInputs) -> None:
        """Images for classes, shared out over the ranks."""
        from fullshard.dist import reduce

        model: Any = inputs.model
        made = make_images(
            inputs.objective,
            model,
            self._labels(model.null_label),
            self.sampler(inputs.objective, model),
            batch=self.batch_size,
            place=reduce.place(),
            device=inputs.device,
            vae=inputs.aux.get("vae"),
        )
        with inputs.bar(-(-self.images // (reduce.place()[0] * self.batch_size))) as bar:
            for numbers, images in made:
                metric.update(self._for_extractor(images[(numbers != FILLER).to(images.device)], inputs), real=False)
                bar.advance()

    def _look_at_texts(self, metric: Any, inputs: EvaluationInputs) -> None:
        """Images for the held-out texts, each rank for its own, in rounds until there are enough."""
        import torch

        from fullshard.dist import reduce
        from fullshard.dist.upload import to_device

        assert self._real is not None
        texts = len(self._real.labels)
        rounds = -(-self.images // texts)
        with inputs.bar(rounds * inputs.num_batches) as bar:
            for start in range(0, rounds * texts, texts):
                for batch in inputs.batches():
                    ids = batch["sample_ids"]
                    numbers = torch.where((ids >= 0) & (ids + start < self.images), ids + start, FILLER)
                    # In the last round nothing may be left to make; all ranks must agree on that.
                    if reduce.any_rank(bool((numbers != FILLER).any()), inputs.device):
                        self._look_at_batch(metric, inputs, to_device(batch, inputs.device), numbers)
                    bar.advance()

    def _look_at_batch(self, metric: Any, inputs: EvaluationInputs, batch: Batch, numbers: torch.Tensor) -> None:
        import torch

        (text, empty), labels = texts_of(inputs.model, batch, inputs.aux), batch["label"]
        for rows in torch.arange(len(numbers)).split(self.batch_size):
            images = make_batch(
                inputs.objective,
                inputs.model,
                labels[rows],
                numbers[rows].to(inputs.device),
                self.sampler(inputs.objective, inputs.model),
                text={name: part[rows] for name, part in text.items()},
                empty=empty,
                shape=shape_of(batch["images"], inputs.objective),
                vae=inputs.aux.get("vae"),
            )
            metric.update(self._for_extractor(images[(numbers[rows] != FILLER).to(images.device)], inputs), real=False)

    def _labels(self, null_label: int | None) -> torch.Tensor:
        """One label per image: those of the data, shuffled once and repeated."""
        import torch

        assert self._real is not None
        data = self._real.labels
        order = torch.from_numpy(np.random.default_rng(self.seed).permutation(len(data)))
        labels = data[order[torch.arange(self.images) % len(data)]]
        return labels if null_label is None else torch.where(labels < 0, null_label, labels)

    def _for_extractor(self, images: torch.Tensor, inputs: EvaluationInputs) -> torch.Tensor:
        """Images as the extractor takes them. A rank may have no images, which a VAE cannot decode."""
        if not len(images):
            return images
        return as_pixels(inputs.collator.decode(images), as_bytes=self.pixels == "uint8")

    def _shape(self, inputs: EvaluationInputs) -> Shape:
        """The shape of the images that the extractor gets, by the held-out ones."""
        batch = next(iter(inputs.batches()))
        channels, height, width = inputs.collator.decode(batch["images"][:1].to(inputs.device)).shape[1:]
        return channels, height, width

    def _open(self, shape: Shape) -> Extractor:
        """Loads the extractor, and tries it."""
        import torch

        from fullshard.families.diffusion.evaluations.feature_extractor import Extractor

        callback = load_callable(self.extractor, where=WHERE)
        found = trial(callback, shape, WHERE, as_bytes=self.pixels == "uint8")
        if not isinstance(found, torch.Tensor) or found.dim() < 2 or len(found) != 2:
            said = f"a tensor of {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise RecipeError(
                f"{WHERE} = {self.extractor!r} returned {said} for 2 images of {list(shape)}. It must return a tensor "
                "with a row of features for each."
            )
        self._extractor = Extractor(callback, found.flatten(1).shape[1])
        return self._extractor


@dataclass(frozen=True)
class _Real:
    """What is kept of the held-out images."""

    batches: Any
    """Where they were read from."""
    sums: dict[str, torch.Tensor]
    labels: torch.Tensor


def _metric_class() -> Any:
    try:
        from torchmetrics.image.fid import FrechetInceptionDistance
    except ImportError as error:
        raise missing_package("torchmetrics", extra="fid", needed_by="evaluate.parts: kind fid") from error
    return FrechetInceptionDistance


def _sums(metric: Any, which: str, inputs: EvaluationInputs) -> dict[str, torch.Tensor]:
    """torchmetrics' sums for the real or the fake images, over all ranks."""
    names = [f"{which}_features_{state}" for state in ("sum", "cov_sum", "num_samples")]
    return {name: inputs.sum_over_ranks(getattr(metric, name).clone()) for name in names}


__all__ = ["Fid"]
