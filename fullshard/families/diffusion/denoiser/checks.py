"""What objectives of denoising refuse, and what they prove about a denoiser before the first step.

Must not know how losses are computed, optimizers or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fullshard.errors import DataError, RecipeError, SetupError
from fullshard.families.diffusion.denoiser.batch_inputs import denoised, knows_none, name_of, require_texts, texts_of
from fullshard.families.diffusion.denoiser.input_shape import require_shape

NEIGHBOURS = 10
"""Timesteps that a model is tried with before the first step: the last ones, where floating formats are coarsest. With
the first timestep that makes eleven, a number that is rarely a dimension of anything else."""


def check_samples(module: Any, stored: Any, *, vae: Any) -> None:
    """Encoded samples have the shape that the model is configured for, and labels that it knows. `vae` is the frozen
    one that makes latents of them in every step."""
    _check_labels(module, stored)
    require_text(module, {"text_states", "text_tokens"} & set(stored.store.names))
    if "image" not in stored.store.names:
        return  # samples of an encoder of the user's: the first batch is looked at
    values = stored.store.flat("image")
    shape, is_latent = values.shape[1:], values.dtype == np.float32
    before = getattr(stored.encoder, "vae", None)
    if vae is not None and is_latent:
        raise RecipeError(
            "objective.vae makes latents of images, and data.train gives latents already"
            f"{' (data.encode.vae)' if before is not None else ''}. Leave one of the two out."
        )
    if vae is not None:
        seen = _latent_shape(vae, shape)
        what, scale = f"images of {' x '.join(map(str, shape))}, which objective.vae makes latents", shape[1] // seen[1]
        require_shape(module, seen, what=what, scale=scale)
    else:
        scale = None if before is None else before.factor()
        what = "images" if not is_latent else "latents" if before is None else "latents by data.encode.vae"
        require_shape(module, shape, what=what, scale=scale if is_latent else 1)


def _check_labels(module: Any, stored: Any) -> None:
    """Every sample has a label that the model has a row for; the record of the first that has none is named."""
    classes = getattr(module, "num_classes", None)
    if classes is None:
        return
    labels = stored.store.flat("label")[stored.chosen]
    wrong = stored.chosen[(labels < 0) | (labels >= classes)]
    if wrong.size:
        label = int(stored.store.flat("label")[wrong[0]])
        found = "no label" if label < 0 else f"the label {label}"
        raise DataError(
            f"{stored.records.where(int(stored.store.records[wrong[0]]))}: {found}, and the model has the classes 0 to "
            f"{classes - 1} ({wrong.size:,} of {len(labels):,} samples). Set model.classes to their number, or "
            "give the record another label."
        )


def require_denoiser(module: Any, *, kind: str, label_drop: float | None) -> None:
    """Refuses a module that cannot denoise, or that knows no label for what shall be dropped."""
    if not hasattr(module, "denoise"):
        raise RecipeError(
            f"objective.kind = {kind} needs a model that denoises images, and {type(module).__name__} has no method "
            "denoise. Use model.kind: diffusers."
        )
    if label_drop and not knows_none(module):
        raise RecipeError(
            f"objective.label_drop = {label_drop:g}, and {type(module).__name__} has no label that means none: only 0 "
            "is allowed. Leave objective.label_drop out, or give the model its classes (model.classes)."
        )


def require_share(label_drop: float | None) -> None:
    """Refuses a share of labels and texts to drop that makes no sense, in words for a check of settings."""
    if label_drop is None or 0 <= label_drop < 1:
        return
    why = "drops every label and text, so the model would learn none" if label_drop == 1 else "is no share"
    raise ValueError(
        f"objective.label_drop = {label_drop:g} {why}. Give at least 0 and less than 1, such as 0.1; for a model "
        "without labels leave model.classes out"
    )


def require_vae(family: Any) -> None:
    """Refuses a frozen model that makes no latents, in words for a check of settings."""
    if family is not None and not hasattr(family, "latent_shape"):
        raise ValueError(
            f"objective.vae.kind = {family.kind()} makes no latents of images. Use objective.vae: {{kind: autoencoder, "
            "path: FOLDER}"
        )


def last_times(num: int, device: torch.device) -> torch.Tensor:
    """The middle of the first and of the last few of `num` equal parts of the time from 0 to 1; fp32."""
    steps = torch.tensor([0, *range(max(num - NEIGHBOURS, 1), num)], dtype=torch.float32, device=device)
    return (steps + 0.5) / num


def require_data(model: Any, batch: dict[str, Any], *, shape: Sequence[int]) -> None:
    """Refuses a first batch whose images, which reach the model as (C, H, W), or texts are not those that it takes."""
    require_shape(model, shape, what="images or latents", scale=None)
    require_text(model, {"text_states", "text_tokens"} & set(batch))
    if "text_states" in batch:
        require_texts(model, batch)


def require_text(model: Any, has: set[str]) -> None:
    """Refuses texts for a model that takes none, and none for one that does."""
    takes = getattr(model, "text_width", None)
    if takes is None and has:
        raise RecipeError(
            f"data.encode.text gives texts, and {name_of(model)} takes none. Leave data.encode.text out, or choose a "
            "model that is conditioned on texts."
        )
    if takes is not None and not has:
        raise RecipeError(
            f"{name_of(model)} is conditioned on texts (states of {takes}), and the data has none. Name the text "
            "encoder in data.encode.text, with records that have a text."
        )


@torch.no_grad()
def check_denoiser(
    model: Any, batch: dict[str, Any], timesteps: torch.Tensor, *, compute: torch.dtype, vae: Any = None
) -> list[str]:
    """One image, at timesteps that lie side by side: the prediction has its shape, and no part of the model is given
    two of the timesteps as one. Returns the line that says so, or none where no part takes timesteps. `vae` says what
    shape the images take on, and is not asked for more."""
    images = batch["images"] if vae is None else _latents_of(batch["images"], vae)
    require_data(model, batch, shape=images.shape[1:])
    image = images[:1].float().expand(len(timesteps), *images.shape[1:]).contiguous()
    classes = getattr(model, "num_classes", None)
    labels = None if classes is None else torch.zeros(len(timesteps), dtype=torch.int64, device=images.device)
    text = None
    if "text_states" in batch:  # tokens are not encoded here: a stand-in has the same shape
        texts, _ = texts_of(model, batch)
        text = {name: part[:1].expand(len(timesteps), *part.shape[1:]) for name, part in texts.items()}
    told: dict[str, bool] = {}
    parts: list[tuple[str, nn.Module]] = list(model.named_modules())
    hooks = [part.register_forward_hook(_watch(name, told, timesteps), with_kwargs=True) for name, part in parts]
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            found = denoised(model, image, timesteps, labels, text)
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


def _latents_of(images: torch.Tensor, vae: Any) -> torch.Tensor:
    """Zeros in the shape of the latents of images."""
    most = float(images.abs().max())
    if most > 1:
        raise RecipeError(
            f"objective.vae takes images with values from -1 to 1, and those of data.train go up to {most:g}. Leave "
            "data.encode.mean and data.encode.scale out, and give images, not latents."
        )
    return images.new_zeros(len(images), *_latent_shape(vae, images.shape[1:]))


def _latent_shape(vae: Any, shape: Sequence[int]) -> tuple[int, int, int]:
    try:
        return vae.latent_shape(shape)  # type: ignore[no-any-return]
    except ValueError as error:
        raise RecipeError(f"objective.vae: an image of data.train {error}.") from None


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


__all__ = ["check_denoiser", "check_samples", "last_times", "require_denoiser", "require_share", "require_vae"]
