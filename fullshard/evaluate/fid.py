"""The Fréchet distance between held-out images and images that the model makes, by features of the user's extractor.

torchmetrics computes it. Every rank looks at its own share of both; sums over all ranks decide, so each image counts
once. Must not know FSDP or how the model was trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, PrivateAttr
from torch import nn

from fullshard.diffusion.grid import FILLER, Way, make_images
from fullshard.diffusion.judge import Shape, as_given, require_denoiser, require_images, trial
from fullshard.diffusion.sampler import Method
from fullshard.dist import reduce
from fullshard.errors import RecipeError, missing_package
from fullshard.evaluate.base import Evaluation, EvaluationInputs, Findings
from fullshard.objectives.base import Objective
from fullshard.user_code import load_callable

WHERE = "evaluate.parts: fid.extractor"


class Fid(Evaluation):
    """How far the model's images are from held-out ones: `fid`, lower is nearer."""

    extractor: str
    """What turns images (B, C, H, W) into features (B, N): path.py:Name or my_package.my_module.Name of a torch module,
    of a class that makes one without arguments, or of a function."""
    pixels: Literal["float", "uint8"] = "float"
    """What the extractor takes: numbers from 0 to 1, or bytes."""
    images: int = Field(1000, ge=2)
    """How many are made; classes come as often as in the validation data."""
    batch_size: int = Field(64, ge=1)
    """Images that each rank makes at once."""
    steps: int = Field(32, ge=1)
    """From noise to an image."""
    method: Method = "heun"
    """euler asks the model once a step, heun twice, and needs fewer steps for the same."""
    guidance: float = Field(1.0, ge=0)
    """How much a label counts: 1 is what the model learned."""
    seed: int = 0
    """Decides the noise and the order of classes."""

    _shown: Callable[[torch.Tensor], torch.Tensor] = PrivateAttr()
    """What takes the data's scaling off images."""
    _extractor: _Extractor | None = PrivateAttr(None)
    _real: _Real | None = PrivateAttr(None)

    def gives(self, objective: Objective) -> tuple[str, ...] | None:
        return ("fid",)

    def check(self, objective: Objective, model: nn.Module, held_out: Any) -> None:
        _metric_class()
        require_denoiser("fid", objective, model)
        if held_out is None or len(held_out.chosen) < 2:
            raise RecipeError(
                "evaluate.parts: kind fid compares with held-out images, at least 2. Give data.validation, or "
                "data.holdout above 0."
            )

    def check_encoder(self, objective: Objective, model: nn.Module, encoder: Any) -> None:
        self._shown = encoder.shown
        if shape := require_images("fid", objective, model, encoder):
            self._open(shape)

    @torch.no_grad()
    def run(self, inputs: EvaluationInputs) -> Findings:
        extractor = self._extractor or self._open(self._shape(inputs))
        metric = _metric_class()(extractor, sync_on_compute=False).to(inputs.device)
        ranks, _ = reduce.place()
        # The held-out images are the same at every validation.
        known = self._real is not None and self._real.batches == inputs.batches
        to_do = -(-self.images // (ranks * self.batch_size)) + (0 if known else inputs.num_batches)
        with inputs.bar(to_do) as bar:
            if not known:
                self._real = self._look_at_real(metric, inputs, bar)
            self._look_at_made(metric, inputs, bar)
        assert self._real is not None
        for name, value in (self._real.sums | _sums(metric, "fake", inputs)).items():
            setattr(metric, name, value)
        return Findings({"fid": float(metric.compute())})

    def _look_at_real(self, metric: Any, inputs: EvaluationInputs, bar: Any) -> _Real:
        labels = []
        for batch in inputs.batches():
            there = batch["sample_ids"] >= 0
            metric.update(self._given(batch["images"][there].to(inputs.device)), real=True)
            labels.append(torch.stack([batch["sample_ids"][there], batch["label"][there]], dim=1))
            bar.advance()
        everyone = reduce.gather_uneven(torch.cat(labels).to(inputs.device)).cpu()
        # In the order of the data, which does not depend on the ranks.
        return _Real(inputs.batches, _sums(metric, "real", inputs), everyone[everyone[:, 0].argsort(), 1])

    def _look_at_made(self, metric: Any, inputs: EvaluationInputs, bar: Any) -> None:
        model: Any = inputs.model
        for numbers, images in make_images(
            inputs.objective,
            model,
            self._labels(model.null_label),
            Way(self.steps, self.method, self.guidance, self.seed),
            batch=self.batch_size,
            place=reduce.place(),
            device=inputs.device,
            vae=inputs.aux.get("vae"),
        ):
            metric.update(self._given(images[(numbers != FILLER).to(images.device)]), real=False)
            bar.advance()

    def _labels(self, null_label: int | None) -> torch.Tensor:
        """One for each image: those of the data, shuffled once and taken over and over."""
        assert self._real is not None
        data = self._real.labels
        order = torch.from_numpy(np.random.default_rng(self.seed).permutation(len(data)))
        labels = data[order[torch.arange(self.images) % len(data)]]
        return labels if null_label is None else torch.where(labels < 0, null_label, labels)

    def _given(self, images: torch.Tensor) -> torch.Tensor:
        """What the extractor is shown; a rank may have no image, of which a VAE would make nothing."""
        return as_given(self._shown(images), as_bytes=self.pixels == "uint8") if len(images) else images

    def _shape(self, inputs: EvaluationInputs) -> Shape:
        """Of the images that the extractor will see, by the held-out ones."""
        batch = next(iter(inputs.batches()))
        channels, height, width = self._shown(batch["images"][:1].to(inputs.device)).shape[1:]
        return channels, height, width

    def _open(self, shape: Shape) -> _Extractor:
        """The extractor, which shows here what it gives."""
        judge = load_callable(self.extractor, where=WHERE)
        found = trial(judge, shape, WHERE, as_bytes=self.pixels == "uint8")
        if not isinstance(found, torch.Tensor) or found.dim() < 2 or len(found) != 2:
            said = f"a tensor of {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise RecipeError(
                f"{WHERE} = {self.extractor!r} gave {said} for 2 images of {list(shape)}. It must give a tensor with "
                "a row of features for each."
            )
        self._extractor = _Extractor(judge, found.flatten(1).shape[1])
        return self._extractor


@dataclass(frozen=True)
class _Real:
    """What there is to know of the held-out images."""

    batches: Any
    """Where they were read from."""
    sums: dict[str, torch.Tensor]
    labels: torch.Tensor


class _Extractor(nn.Module):
    """The user's, in the form that torchmetrics asks for; no images have no features."""

    def __init__(self, judge: Any, num_features: int) -> None:
        super().__init__()
        self.judge, self.num_features = judge, num_features
        self.eval()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if not len(images):
            return torch.zeros((0, self.num_features), device=images.device)
        found: torch.Tensor = self.judge(images)
        return found.flatten(1).float()


def _metric_class() -> Any:
    try:
        from torchmetrics.image.fid import FrechetInceptionDistance
    except ImportError as error:
        raise missing_package("torchmetrics", extra="fid", needed_by="evaluate.parts: kind fid") from error
    return FrechetInceptionDistance


def _sums(metric: Any, which: str, inputs: EvaluationInputs) -> dict[str, torch.Tensor]:
    """What torchmetrics has added up of the images of one kind, over all ranks."""
    names = [f"{which}_features_{state}" for state in ("sum", "cov_sum", "num_samples")]
    return {name: inputs.sum_over_ranks(getattr(metric, name).clone()) for name in names}


__all__ = ["Fid"]
