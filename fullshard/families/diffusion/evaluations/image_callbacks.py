"""Calls the user's code that looks at images (a feature extractor, a classifier), and tries it before a run starts.

Must not know what it finds in them, files or ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fullshard.contracts.no_grad import no_grad
from fullshard.errors import RecipeError
from fullshard.families.diffusion.sampling.conditioning import takes_texts
from fullshard.families.diffusion.sampling.image_batches import Shape, image_shape

if TYPE_CHECKING:
    import torch


def require_denoiser(kind: str, objective: Any, model: Any) -> None:
    """Raises RecipeError if the run cannot make images."""
    if not hasattr(objective, "slope") or not hasattr(model, "denoise"):
        raise RecipeError(
            f"evaluate.parts: kind {kind} needs an objective that makes images (flow_matching, ddpm), and "
            f"objective.kind is {objective.kind()}. Leave it out."
        )


def require_images(kind: str, objective: Any, model: Any, encoder: Any) -> Shape | None:
    """The shape of the images; None if a VAE or the data decides it. Raises RecipeError if the model makes latents that
    nothing decodes."""
    if "vae" in objective.frozen() or getattr(encoder, "vae", None) is not None:
        return None
    if model.image_channels not in (1, 3):
        raise RecipeError(
            f"evaluate.parts: kind {kind} looks at images of 1 or 3 channels, but the model has "
            f"{model.image_channels}: these are latents. Name the VAE that decodes them (data.encode.vae or "
            "objective.vae), or leave it out."
        )
    return None if takes_texts(model) else image_shape(model)


def as_pixels(images: torch.Tensor, *, as_bytes: bool = False) -> torch.Tensor:
    """Images with values from -1 to 1 as fp32 from 0 to 1, or as uint8."""
    import torch

    found = (images.float().clamp(-1, 1) + 1) / 2
    return (found * 255).round().to(torch.uint8) if as_bytes else found


@no_grad
def trial(callback: Callable[..., Any], shape: Shape, where: str, *, as_bytes: bool = False) -> Any:
    """What the user's code returns for two images."""
    import torch

    ramp = torch.linspace(-1, 1, 2 * torch.Size(shape).numel()).reshape(2, *shape)
    if isinstance(callback, torch.nn.Module):
        callback.eval()
    try:
        return callback(as_pixels(ramp, as_bytes=as_bytes))
    except Exception as error:  # whatever the user's code raises
        kind = "uint8 from 0 to 255" if as_bytes else "float32 from 0 to 1"
        raise RecipeError(
            f"{where}: it failed on images of shape {list(ramp.shape)}, {kind} "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no text'}). Change it to "
            "accept these images."
        ) from error
