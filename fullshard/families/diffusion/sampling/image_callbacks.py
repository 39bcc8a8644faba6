"""What code of the user's that looks at images is given, and a first try of it before a run begins.

Must not know what it finds in them, files or ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fullshard.errors import RecipeError
from fullshard.families.diffusion.sampling.image_batches import Shape, image_shape, pixels


def require_denoiser(kind: str, objective: Any, model: Any) -> None:
    """Raises RecipeError where no images can be made."""
    if not hasattr(objective, "slope") or not hasattr(model, "denoise"):
        raise RecipeError(
            f"evaluate.parts: kind {kind} needs an objective that images are made by (flow_matching, ddpm), and "
            f"objective.kind is {objective.kind()}. Leave it out."
        )


def takes_texts(model: Any) -> bool:
    return getattr(model, "text_width", None) is not None


def is_conditioned(model: Any) -> bool:
    return takes_texts(model) or getattr(model, "num_classes", None) is not None


def guidance_of(model: Any, objective: Any, asked: float | None, *, usual: float, where: str) -> float:
    """How much a label or a text counts: what was asked for, or what is usual; 1 where the model has nothing to compare
    with. Refuses a number that could have no effect, or a wrong one."""
    if not is_conditioned(model):
        if asked in (None, 1):
            return 1.0
        raise RecipeError(
            f"{where} = {asked:g}: guidance is how much a label or a text counts, and the model takes neither. Leave "
            "it out, or train with labels (model.classes) or texts (data.encode.text)."
        )
    if getattr(model, "is_fresh", False) and getattr(objective, "label_drop", None) == 0:
        if asked in (None, 1):
            return 1.0
        raise RecipeError(
            f"{where} = {asked:g} compares with the model's answer to no label and no text, which it has never "
            "learned: objective.label_drop = 0. Set it to 1, or train with objective.label_drop above 0, such as 0.1."
        )
    if asked is not None:
        return asked
    # A model that takes its guidance as an input is guided already: its pipeline adds none unless asked to.
    return 1.0 if getattr(model, "is_told_guidance", False) else usual


def require_images(kind: str, objective: Any, model: Any, encoder: Any) -> Shape | None:
    """The shape of the images that are made; None where a VAE or the data decides it. RecipeError for latents that stay
    so."""
    if "vae" in objective.frozen() or getattr(encoder, "vae", None) is not None:
        return None
    if model.image_channels not in (1, 3):
        raise RecipeError(
            f"evaluate.parts: kind {kind} looks at images of 1 or 3 channels, and the model has "
            f"{model.image_channels}: latents are no images. Name the VAE that makes images of them (data.encode.vae "
            "or objective.vae), or leave it out."
        )
    return None if takes_texts(model) else image_shape(model)


def shape_of(images: torch.Tensor, objective: Any) -> tuple[int, ...]:
    """Of what the model makes, by the images of a batch."""
    shape, vae = tuple(images.shape[1:]), objective.frozen().get("vae")
    return shape if vae is None else tuple(vae.latent_shape(shape))


def kept_open(encoder: Any) -> AbstractContextManager[None]:
    """Within it a VAE that `encoder.shown` decodes with stays open."""
    vae = getattr(encoder, "vae", None)
    return nullcontext() if vae is None else vae.kept()  # type: ignore[no-any-return]


def as_given(images: torch.Tensor, *, as_bytes: bool = False) -> torch.Tensor:
    """Images with values from -1 to 1 as fp32 from 0 to 1, or as bytes."""
    found = pixels(images)
    return (found * 255).round().to(torch.uint8) if as_bytes else found


@torch.no_grad()
def trial(judge: Callable[..., Any], shape: Shape, where: str, *, as_bytes: bool = False) -> Any:
    """What the user's code says to two images."""
    ramp = torch.linspace(-1, 1, 2 * torch.Size(shape).numel()).reshape(2, *shape)
    if isinstance(judge, torch.nn.Module):
        judge.eval()
    try:
        return judge(as_given(ramp, as_bytes=as_bytes))
    except Exception as error:  # whatever the user's code raises
        kind = "uint8 from 0 to 255" if as_bytes else "float32 from 0 to 1"
        raise RecipeError(
            f"{where}: it failed on images of shape {list(ramp.shape)}, {kind} "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no text'}). Let it take such "
            "images."
        ) from error


__all__ = [
    "as_given",
    "guidance_of",
    "is_conditioned",
    "kept_open",
    "require_denoiser",
    "require_images",
    "shape_of",
    "takes_texts",
    "trial",
]
