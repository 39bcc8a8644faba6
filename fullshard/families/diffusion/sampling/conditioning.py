"""What a model can be conditioned on when images are sampled, and the guidance that follows. Must not know ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from fullshard.errors import RecipeError
from fullshard.families.diffusion.image_samples import ImageCollator

if TYPE_CHECKING:
    import torch


def takes_texts(model: Any) -> bool:
    return getattr(model, "text_width", None) is not None


def is_conditioned(model: Any) -> bool:
    return takes_texts(model) or getattr(model, "num_classes", None) is not None


def guidance_of(model: Any, objective: Any, asked: float | None, *, usual: float, where: str) -> float:
    """The guidance in force: as asked, or `usual`; 1 if the model has nothing to compare with. Raises RecipeError for a
    value that could have no effect, or a wrong one."""
    if not is_conditioned(model):
        if asked in (None, 1):
            return 1.0
        raise RecipeError(
            f"{where} = {asked:g}: guidance is the weight of a label or a text, but the model takes neither. Leave it "
            "out, or train with labels (model.classes) or texts (data.encode.text)."
        )
    if getattr(model, "is_fresh", False) and getattr(objective, "label_drop", None) == 0:
        if asked in (None, 1):
            return 1.0
        raise RecipeError(
            f"{where} = {asked:g} compares with the model's answer without label and text, which it has never "
            "learned: objective.label_drop = 0. Set it to 1, or train with objective.label_drop above 0, such as 0.1."
        )
    if asked is not None:
        return asked
    # A guidance-distilled model is guided already: its pipeline adds no guidance by default.
    return 1.0 if getattr(model, "is_told_guidance", False) else usual


def shape_of(images: torch.Tensor, objective: Any) -> tuple[int, ...]:
    """The shape of what the model makes, by the images of a batch."""
    shape, vae = tuple(images.shape[1:]), objective.frozen().get("vae")
    return shape if vae is None else tuple(vae.latent_shape(shape))


def kept_open(collator: Any) -> AbstractContextManager[None]:
    """Within it, the VAE of `collator.decode` stays open; the collator of a user's encoder has none."""
    return collator.vae_kept_open() if isinstance(collator, ImageCollator) else nullcontext()
