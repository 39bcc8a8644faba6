"""What objectives of denoising share: the betas of DDPM, what a denoiser is given of a batch, and proofs about it.

A denoiser has the method `denoise(noisy, timesteps, labels)`; `num_classes` is None where it takes no labels, and
`null_label`, where it has one, is the label that means none. Must not know a model's class, optimizers or ranks.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import torch
from torch import nn

from fullshard.errors import RecipeError, SetupError
from fullshard.ops.keyed_noise import LABEL_DROP, uniform

Betas = Literal["linear", "cosine"]
Prediction = Literal["epsilon", "v"]

LABELS_DROPPED = 0.1
"""The share of labels that is dropped where the recipe names none and the model knows a label that means none."""
NEIGHBOURS = 10
"""Timesteps that a model is tried with before the first step: the last ones, where floating formats are coarsest. With
the first timestep that makes eleven, a number that is rarely a dimension of anything else."""


@functools.cache
def alphas_cumprod(betas: Betas, num_timesteps: int, device: torch.device) -> torch.Tensor:
    """(num_timesteps,) fp32: the share of the image in the variance of a noisy one, as diffusers' DDPMScheduler has it
    for its linear and squaredcos_cap_v2 betas."""
    if betas == "linear":
        each = torch.linspace(1e-4, 0.02, num_timesteps, dtype=torch.float32)
    else:

        def left(share: float) -> float:
            return math.cos((share + 0.008) / 1.008 * math.pi / 2) ** 2

        ends = [left(step / num_timesteps) for step in range(num_timesteps + 1)]
        steps = zip(ends, ends[1:], strict=False)
        each = torch.tensor([min(1 - after / before, 0.999) for before, after in steps], dtype=torch.float32)
    return (1 - each).cumprod(0).to(device)


def noised(images: torch.Tensor, noise: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Images with noise, where `kept` (B,) is the image's share of the variance."""
    return _wide(kept.sqrt(), images) * images + _wide((1 - kept).sqrt(), images) * noise


def velocity(images: torch.Tensor, noise: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """What v-prediction predicts."""
    return _wide(kept.sqrt(), images) * noise - _wide((1 - kept).sqrt(), images) * images


def min_snr_weights(kept: torch.Tensor, gamma: float, prediction: Prediction) -> torch.Tensor:
    """(B,): what a sample's loss is multiplied by, so that as an error of the image it counts at most `gamma`."""
    snr = kept / (1 - kept)
    return snr.clamp(max=gamma) / (snr if prediction == "epsilon" else snr + 1)


def given(model: Any, batch: dict[str, Any], *, label_drop: float | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Images and labels as the model gets them, some labels replaced by the one that means none. Fillers are blank, so
    that nothing that they happen to hold reaches the model."""
    real = batch["sample_ids"] >= 0
    images = torch.where(_wide(real, batch["images"]), batch["images"].float(), 0.0)
    if getattr(model, "num_classes", None) is None:
        return images, None
    labels = torch.where(real, batch["label"], 0)
    if share := _drop_rate(model, label_drop):
        labels = torch.where(uniform(batch["draws"], LABEL_DROP) < share, model.null_label, labels)
    return images, labels


def _drop_rate(model: Any, label_drop: float | None) -> float:
    """The share of labels that is dropped, as the recipe says or by what the model knows."""
    if label_drop is not None:
        return label_drop
    return 0.0 if getattr(model, "null_label", None) is None else LABELS_DROPPED


def sum_of_means(apart: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """The sum over samples, fillers left out, of the mean over a sample's elements."""
    return torch.where(batch["sample_ids"] >= 0, apart.flatten(1).mean(1), 0.0).sum()


def require_denoiser(module: Any, *, kind: str, label_drop: float | None) -> None:
    """Refuses a module that cannot denoise, or that knows no label for what shall be dropped."""
    if not hasattr(module, "denoise"):
        raise RecipeError(
            f"objective.kind = {kind} needs a model that denoises images, and {type(module).__name__} has no method "
            "denoise. Use model.kind: diffusers."
        )
    if label_drop and getattr(module, "null_label", None) is None:
        raise RecipeError(
            f"objective.label_drop = {label_drop:g}, and {type(module).__name__} has no label that means none: only 0 "
            "is allowed. Leave objective.label_drop out, or give the model its classes (model.classes)."
        )


def last_times(num: int, device: torch.device) -> torch.Tensor:
    """The middle of the first and of the last few of `num` equal parts of the time from 0 to 1; fp32."""
    steps = torch.tensor([0, *range(max(num - NEIGHBOURS, 1), num)], dtype=torch.float32, device=device)
    return (steps + 0.5) / num


@torch.no_grad()
def check_denoiser(model: Any, images: torch.Tensor, timesteps: torch.Tensor, *, compute: torch.dtype) -> list[str]:
    """One image, at timesteps that lie side by side: the prediction has its shape, and no part of the model is given
    two of the timesteps as one. Returns the line that says so, or none where no part takes timesteps."""
    image = images[:1].float().expand(len(timesteps), *images.shape[1:]).contiguous()
    classes = getattr(model, "num_classes", None)
    labels = None if classes is None else torch.zeros(len(timesteps), dtype=torch.int64, device=images.device)
    told: dict[str, bool] = {}
    parts: list[tuple[str, nn.Module]] = list(model.named_modules())
    hooks = [part.register_forward_hook(_watch(name, told, timesteps), with_kwargs=True) for name, part in parts]
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            found = model.denoise(image, timesteps, labels)
    finally:
        for hook in hooks:
            hook.remove()
    if found.shape != image.shape:
        raise SetupError(
            f"model.denoise gives {tuple(found.shape)} for images of {tuple(image.shape)}: a prediction has the shape "
            "of the images. Use a model whose output has as many channels and the same size."
        )
    dtype = str(compute).removeprefix("torch.")
    if merged := [name for name, apart in told.items() if not apart]:
        first, last = timesteps[1].item(), timesteps[-1].item()
        raise SetupError(
            f"Computing in {dtype}, {merged[0] or 'the model'} is given some of the timesteps {first:g} to {last:g} as "
            "one, so the model cannot tell them apart: its times are cast to half precision, or lie too close. Keep "
            "them whole numbers or fp32 up to the embedding, raise objective.timestep_scale where the objective has "
            "it, or use precision: fp32."
        )
    return [f"neighbouring timesteps reach the model apart ({dtype})"] if told else []


def _watch(name: str, told: dict[str, bool], timesteps: torch.Tensor) -> Any:
    """Notes whether a part that is given something that follows from the timestep is given as many values as there are
    timesteps. Only vectors are looked at, one a sample: in images a small change may be lost, and rightly so."""

    def look(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen = [*args, *kwargs.values()] + ([output] if next(part.children(), None) is None else [])
        for value in seen:
            if isinstance(value, torch.Tensor) and value.dim() <= 2 and value.shape[:1] == timesteps.shape:
                differ = (value[1:] != value[:-1]).reshape(len(value) - 1, -1).any(1)
                if bool(differ.any()):
                    told[name] = told.get(name, True) and bool(differ.all())

    return look


def _wide(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, *(1,) * (like.dim() - 1))


__all__ = [
    "Betas",
    "Prediction",
    "alphas_cumprod",
    "check_denoiser",
    "given",
    "last_times",
    "min_snr_weights",
    "noised",
    "require_denoiser",
    "sum_of_means",
    "velocity",
]
