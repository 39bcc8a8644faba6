"""What denoising objectives require of the data and the model, and what they prove about a denoiser before step 1.

Must not know how losses are computed, optimizers or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fullshard.contracts.no_grad import no_grad
from fullshard.errors import DataError, RecipeError, SetupError
from fullshard.families.diffusion.denoiser.batch_inputs import (
    can_be_unconditional,
    denoised,
    name_of,
    require_texts,
    texts_of,
)
from fullshard.families.diffusion.denoiser.input_shape import require_shape

if TYPE_CHECKING:
    import torch
    from torch import nn

NEIGHBOURS = 10
"""Timesteps that a model is tried with before step 1: the last ones, where floating-point formats are coarsest. With
timestep 0 that makes eleven, which is rarely a dimension of anything else."""


def check_samples(module: Any, stored: Any, *, vae: Any) -> None:
    """Encoded samples have the shape that the model is configured for, and labels that it knows. `vae` is the frozen
    VAE that encodes them in every step."""
    _check_labels(module, stored)
    require_text(module, {"text_states", "text_tokens"} & set(stored.store.names))
    if "image" not in stored.store.names:
        return  # a user's own encoder: the first batch is checked instead
    values = stored.store.flat("image")
    shape, is_latent = values.shape[1:], values.dtype == np.float32
    before = getattr(stored.encoder, "vae", None)
    if vae is not None and is_latent:
        raise RecipeError(
            "objective.vae encodes images to latents, but data.train already gives latents"
            f"{' (data.encode.vae)' if before is not None else ''}. Leave one of the two out."
        )
    if vae is not None:
        seen = _latent_shape(vae, shape)
        what = f"images of {' x '.join(map(str, shape))}, which objective.vae encodes to latents"
        require_shape(module, seen, what=what, scale=shape[1] // seen[1])
    else:
        scale = None if before is None else before.factor()
        what = "images" if not is_latent else "latents" if before is None else "latents by data.encode.vae"
        require_shape(module, shape, what=what, scale=scale if is_latent else 1)


def _check_labels(module: Any, stored: Any) -> None:
    """Every sample has a label that the model has a row for; the error names the first record without one."""
    classes = getattr(module, "num_classes", None)
    if classes is None:
        return
    labels = stored.store.flat("label")[stored.chosen]
    wrong = stored.chosen[(labels < 0) | (labels >= classes)]
    if wrong.size:
        label = int(stored.store.flat("label")[wrong[0]])
        found = "no label" if label < 0 else f"the label {label}"
        raise DataError(
            f"{stored.records.where(int(stored.store.records[wrong[0]]))}: {found}, but the model has the classes 0 to "
            f"{classes - 1} ({wrong.size:,} of {len(labels):,} samples). Set model.classes to their number, or "
            "give the record another label."
        )


def require_denoiser(module: Any, *, kind: str, label_drop: float | None) -> None:
    """Raises RecipeError if a module cannot denoise, or if labels are dropped and it has no label for "no class"."""
    if not hasattr(module, "denoise"):
        raise RecipeError(
            f"objective.kind = {kind} needs a model that denoises images, but {type(module).__name__} has no method "
            "denoise. Use model.kind: diffusers."
        )
    if label_drop and not can_be_unconditional(module):
        raise RecipeError(
            f'objective.label_drop = {label_drop:g}, but {type(module).__name__} has no label for "no class": only 0 '
            "is allowed. Leave objective.label_drop out, or give the model its classes (model.classes)."
        )


def require_share(label_drop: float | None) -> None:
    """Raises ValueError, for a validator, if the share of labels and texts to drop is not valid."""
    if label_drop is None or 0 <= label_drop < 1:
        return
    why = "would drop every label and text" if label_drop == 1 else "is not a share"
    raise ValueError(
        f"objective.label_drop = {label_drop:g} {why}. Give at least 0 and less than 1, such as 0.1; for a model "
        "without labels leave model.classes out"
    )


def require_vae(family: Any) -> None:
    """Raises ValueError, for a validator, if the frozen model is not a VAE."""
    if family is not None and not hasattr(family, "latent_shape"):
        raise ValueError(
            f"objective.vae.kind = {family.kind()} is not a VAE. Use objective.vae: {{kind: autoencoder, path: FOLDER}}"
        )


def last_times(num: int, device: torch.device) -> torch.Tensor:
    """fp32: the middles of the first and the last few of `num` equal parts of the time from 0 to 1."""
    import torch

    steps = torch.tensor([0, *range(max(num - NEIGHBOURS, 1), num)], dtype=torch.float32, device=device)
    return (steps + 0.5) / num


def require_data(model: Any, batch: dict[str, Any], *, shape: Sequence[int]) -> None:
    """Raises RecipeError if the first batch's images, of (C, H, W), or texts are not what the model takes."""
    require_shape(model, shape, what="images or latents", scale=None)
    require_text(model, {"text_states", "text_tokens"} & set(batch))
    if "text_states" in batch:
        require_texts(model, batch)


def require_text(model: Any, has: set[str]) -> None:
    """Raises RecipeError for texts that the model does not take, or if it needs texts and `has` is empty."""
    takes = getattr(model, "text_width", None)
    if takes is None and has:
        raise RecipeError(
            f"data.encode.text gives texts, but {name_of(model)} takes no texts. Leave data.encode.text out, or "
            "choose a text-conditioned model."
        )
    if takes is not None and not has:
        raise RecipeError(
            f"{name_of(model)} is conditioned on texts (states of width {takes}), but the data has none. Name the text "
            "encoder in data.encode.text, and use records with a text."
        )


@no_grad
def check_denoiser(
    model: Any, batch: dict[str, Any], timesteps: torch.Tensor, *, compute: torch.dtype, vae: Any = None
) -> list[str]:
    """Runs one image at neighbouring timesteps: the prediction has the image's shape, and no part of the model gets
    the same value for two timesteps. Returns the line that says so, or nothing if no part takes timesteps. Of `vae`
    only the shape of its latents is used."""
    import torch

    images = batch["images"] if vae is None else _latents_of(batch["images"], vae)
    require_data(model, batch, shape=images.shape[1:])
    image = images[:1].float().expand(len(timesteps), *images.shape[1:]).contiguous()
    classes = getattr(model, "num_classes", None)
    labels = None if classes is None else torch.zeros(len(timesteps), dtype=torch.int64, device=images.device)
    text = None
    if "text_states" in batch:  # tokens are not encoded here: a placeholder has the same shape
        texts, _ = texts_of(model, batch)
        text = {name: part[:1].expand(len(timesteps), *part.shape[1:]) for name, part in texts.items()}
    distinct: dict[str, bool] = {}
    parts: list[tuple[str, nn.Module]] = list(model.named_modules())
    hooks = [part.register_forward_hook(_watch(name, distinct, timesteps), with_kwargs=True) for name, part in parts]
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            found = denoised(model, image, timesteps, labels, text)
    finally:
        for hook in hooks:
            hook.remove()
    if found.shape != image.shape:
        raise SetupError(
            f"model.denoise gives {tuple(found.shape)} for images of {tuple(image.shape)}: a prediction must have the "
            "shape of the images. Use a model whose output has as many channels and the same size."
        )
    dtype = str(compute).removeprefix("torch.")
    if merged := [name for name, apart in distinct.items() if not apart]:
        first, last = timesteps[1].item(), timesteps[-1].item()
        raise SetupError(
            f"Computing in {dtype}, {merged[0] or 'the model'} gets the same value for some of the timesteps {first:g} "
            f"to {last:g}, so the model cannot tell them apart: times are cast to half precision, or are too close. "
            "Keep them whole numbers or fp32 up to the embedding, raise objective.timestep_scale if the objective has "
            "it, or use precision: fp32."
        )
    return [f"the model can tell neighbouring timesteps apart ({dtype})"] if distinct else []


def _latents_of(images: torch.Tensor, vae: Any) -> torch.Tensor:
    """Zeros in the shape of the images' latents."""
    most = float(images.abs().max())
    if most > 1:
        raise RecipeError(
            f"objective.vae takes images with values from -1 to 1, but data.train has values up to {most:g}. Leave "
            "data.encode.mean and data.encode.scale out, and give images, not latents."
        )
    return images.new_zeros(len(images), *_latent_shape(vae, images.shape[1:]))


def _latent_shape(vae: Any, shape: Sequence[int]) -> tuple[int, int, int]:
    try:
        return vae.latent_shape(shape)  # type: ignore[no-any-return]
    except ValueError as error:
        raise RecipeError(f"objective.vae: an image of data.train {error}.") from None


def _watch(name: str, distinct: dict[str, bool], timesteps: torch.Tensor) -> Any:
    """A hook: if an input of a part depends on the timestep, `distinct` records whether it differs for every timestep.
    Only inputs with one vector per sample count: in an image, losing a small change is fine."""
    import torch

    def look(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen = [*args, *kwargs.values()] + ([output] if next(part.children(), None) is None else [])
        for value in seen:
            if isinstance(value, torch.Tensor) and value.dim() <= 2 and value.shape[:1] == timesteps.shape:
                differ = (value[1:] != value[:-1]).reshape(len(value) - 1, -1).any(1)
                if bool(differ.any()):
                    distinct[name] = distinct.get(name, True) and bool(differ.all())

    return look
