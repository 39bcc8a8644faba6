"""Checks before any computation that images or latents have the shape a denoiser is configured for.

A denoiser often runs at sizes other than its own, but its export and its samples would keep the configured size. So a
size is changed explicitly, in the model's settings. Must not know data sources, losses or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fullshard.errors import RecipeError
from fullshard.families.diffusion.denoiser.architectures import DIT, FLUX, PACKED, PIXART, SD3, UNET

SIZE = "model.overrides.sample_size"
CHANNELS = "model.overrides.in_channels"
_SQUARE = (DIT, SD3, PIXART)
"""Classes whose configuration holds one number for both sides."""


def configured(model: Any) -> tuple[int | None, tuple[int, int] | None]:
    """Channels, and (height, width), that the model is configured for; None if it does not say."""
    config = getattr(model, "config", None)
    channels = getattr(model, "image_channels", getattr(config, "in_channels", None))
    size = getattr(config, "sample_size", None)
    if size is None or not isinstance(size, (int, list, tuple)):
        return channels, None
    return channels, (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def require_shape(model: Any, shape: Sequence[int], *, what: str, scale: int | None) -> None:
    """Raises RecipeError for data of (C, H, W) that the model is not configured for. `what` names the data; `scale` is
    the number of image pixels per pixel that the model sees, None if the data does not come from images."""
    channels, sides = configured(model)
    found = tuple(int(side) for side in shape[1:])
    name = getattr(model, "class_name", type(model).__name__)
    seen = f"data.train gives {what} of {_by(shape)} (channels x height x width)"
    if channels is not None and channels != shape[0]:
        counted = f"{channels} channel{'' if channels == 1 else 's'}"
        raise RecipeError(f"{seen}, but {name} takes {counted}. {_channels_remedy(model, shape[0], scale)}")
    if not hasattr(model, "class_name"):
        return  # a user's own model may take any size
    _require_whole_patches(model, name, found, seen, scale)
    if name == FLUX:
        return  # positions are an input, so it has no size
    if found != sides:
        says = "has no configured size" if sides is None else f"is configured for {_by(sides)}"
        wanted = found[0] if found[0] == found[1] else list(found)
        raise RecipeError(
            f"{seen}, but {name} {says}. To train, sample and export at {_by(found)}, write {SIZE}: {wanted}"
            f"{'' if sides is None else _resize_remedy(sides, scale)}."
        )


def _require_whole_patches(model: Any, name: str, found: tuple[int, ...], seen: str, scale: int | None) -> None:
    """Raises RecipeError for sides that cannot be cut into patches, or have no positions."""
    if name in _SQUARE and found[0] != found[1]:
        raise RecipeError(
            f"{seen}, but {name} is configured for squares only: its sample_size is one number. "
            f"{'Save square latents.' if scale is None else 'Set data.encode.size to crop the images to squares.'}"
        )
    by = _divisor(model, name)
    if any(side % by for side in found):
        raise RecipeError(
            f"{seen}, but {name} needs sides that are multiples of {by}. "
            + (
                "Save latents of such sizes."
                if scale is None
                else f"Set data.encode.size to a multiple of {by * scale}."
            )
        )
    most = getattr(model.config, "pos_embed_max_size", None)
    if most is not None and max(found) > most * by:
        raise RecipeError(
            f"{seen}, but {name} has positions for at most {most} patches of {by} a side (pos_embed_max_size = "
            f"{most}), which is {_by((most * by, most * by))}. Use smaller data, or from scratch set "
            f"model.overrides.pos_embed_max_size to at least {max(found) // by}."
        )


def _divisor(model: Any, name: str) -> int:
    if name in _SQUARE:
        return int(model.config.patch_size)
    if name == FLUX:
        return PACKED
    # UNet2DConditionModel passes the sizes of down blocks to the up blocks; UNet2DModel does not.
    return 2 ** (len(model.config.down_block_types) - 1) if name == UNET else 1


def _channels_remedy(model: Any, found: int, scale: int | None) -> str:
    by = PACKED**2 if getattr(model, "class_name", "") == FLUX else 1
    ways = [f"From scratch, write {CHANNELS}: {by * found}"]
    wanted = configured(model)[0]
    if scale == 1 and wanted in (1, 3):
        ways.append(f"or set data.encode.channels: {wanted}")
    elif scale == 1:
        ways.append("or name the VAE that encodes images to latents, in data.encode.vae or objective.vae")
    ways.append("or use data that the model was made for")
    return f"{', '.join(ways)}."


def _resize_remedy(sides: tuple[int, int], scale: int | None) -> str:
    if scale is None:
        return "; to keep the model's size, use latents of that size"
    if sides[0] != sides[1]:
        return "; to keep the model's size, use images of that size"
    return f"; to keep the model's size, set data.encode.size: {sides[0] * scale}"


def _by(sides: Sequence[int]) -> str:
    return " x ".join(map(str, sides))
