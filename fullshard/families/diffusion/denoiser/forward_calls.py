"""How each class of denoiser is called with images, times, labels and texts: as diffusers' own pipelines do.

Must not know losses, noise, ranks or files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard.errors import DataError, RecipeError
from fullshard.families.diffusion.denoiser.architectures import DIT, FLUX, PACKED, PIXART, SD3, UNET, UNET_TEXT
from fullshard.families.diffusion.denoiser.batch_inputs import Text

PIXELS = 8
"""Models that take the image size take pixels: this many for one of a latent, in each direction."""
_SIZES = 6
"""Numbers that SDXL takes: original height and width, crop top and left, target height and width."""


def text_widths(class_name: str, config: Any) -> tuple[int | None, int | None]:
    """Widths of a token's state and of the pooled vector; None if the model does not take it."""
    if class_name in (SD3, FLUX):
        return config.joint_attention_dim, config.pooled_projection_dim
    if class_name == PIXART:
        return config.caption_channels or config.cross_attention_dim, None
    return _unet_widths(config) if class_name == UNET_TEXT else (None, None)


def _unet_widths(config: Any) -> tuple[int, int | None]:
    supported = {
        "addition_embed_type": (None, "text", "text_time"),
        "encoder_hid_dim_type": (None, "text_proj"),
        "class_embed_type": (None,),
        "time_cond_proj_dim": (None,),
    }
    for name, allowed in supported.items():
        if (found := getattr(config, name)) not in allowed:
            words = ", ".join("null" if value is None else value for value in allowed)
            raise RecipeError(
                f"{UNET_TEXT}: {name} = {found!r} needs inputs other than times, labels and texts, which is not "
                f"supported yet. Supported: {words}."
            )
    width = config.encoder_hid_dim or config.cross_attention_dim
    widths = {width} if isinstance(width, int) else set(width)
    if len(widths) > 1:
        raise RecipeError(f"{UNET_TEXT}: cross_attention_dim = {sorted(widths)}, but all blocks must have one width.")
    if config.addition_embed_type != "text_time":
        return widths.pop(), None
    return widths.pop(), config.projection_class_embeddings_input_dim - _SIZES * config.addition_time_embed_dim


def text_for(module: Any, text: Text | None, noisy: torch.Tensor) -> Text | None:
    """The texts, checked; without texts a placeholder, for a pass whose result is not used."""
    if module.text_width is None:
        if text is not None:
            raise DataError(
                f"text_states: {module.class_name} takes no texts. Leave them out of the data, or use a model that "
                "does: model.architecture sd3, flux, pixart or unet_text."
            )
        return None
    if text is None:
        return _placeholder(module, len(noisy), device=noisy.device)
    for key, width in (("states", module.text_width), ("pooled", module.pooled_width)):
        found = text[key].shape[-1] if key in text else None
        if width is not None and found != width:
            raise DataError(
                f"text_{key}: {module.class_name} takes vectors of {width}, but the batch has "
                f"{'none' if found is None else f'vectors of {found}'}. Use the text encoder that the model was made "
                "for, or from scratch set the width in model.overrides."
            )
    return text


def _placeholder(module: Any, num: int, *, device: torch.device) -> Text:
    """One token of zeros for each sample. Not the empty text, which follows from the text encoders."""
    found = {
        "states": torch.zeros(num, 1, module.text_width, device=device),
        "mask": torch.ones(num, 1, dtype=torch.bool, device=device),
    }
    if module.pooled_width is not None:
        found["pooled"] = torch.zeros(num, module.pooled_width, device=device)
    return found


def prepare(module: Any) -> None:
    """Changes a module so that `CALLS` can call it."""
    for part in module.modules():
        if type(part).__name__ == "LabelEmbedding":
            # The model's own label dropout would draw from this rank's generator.
            part.dropout_prob = 0.0
    if module.class_name == FLUX:
        module.time_text_embed.exact_times = None
        module.time_text_embed.register_forward_pre_hook(_give_exact_times)


def _give_exact_times(part: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Flux casts times to the dtype of its activations before it embeds them: in bf16, 1,000 times have 501 values."""
    return None if part.exact_times is None else (*part.exact_times, *args[len(part.exact_times) :])


def _dit(module: Any, noisy: torch.Tensor, times: torch.Tensor, labels: Any, text: Any) -> Any:
    # Without classes its embedding table still has one row.
    labels = torch.zeros_like(times).long() if module.num_classes is None else _labels(module, times, labels)
    return module.forward(noisy, times, class_labels=labels).sample


def _unet(module: Any, noisy: torch.Tensor, times: torch.Tensor, labels: Any, text: Any) -> Any:
    return module.forward(noisy, times, class_labels=_labels(module, times, labels)).sample


def _unet_text(module: Any, noisy: torch.Tensor, times: torch.Tensor, labels: Any, text: Text) -> Any:
    added = None
    if module.pooled_width is not None:
        height, width = (PIXELS * side for side in noisy.shape[-2:])
        added = {"text_embeds": text["pooled"], "time_ids": _each(noisy, height, width, 0, 0, height, width)}
    labels = _labels(module, times, labels)
    return module.forward(noisy, times, text["states"], class_labels=labels, added_cond_kwargs=added).sample


def _sd3(module: Any, noisy: torch.Tensor, times: torch.Tensor, labels: Any, text: Text) -> Any:
    return module.forward(noisy, text["states"], text["pooled"], times).sample


def _pixart(module: Any, noisy: torch.Tensor, times: torch.Tensor, labels: Any, text: Text) -> Any:
    added: dict[str, torch.Tensor | None] = {"resolution": None, "aspect_ratio": None}
    if module.use_additional_conditions:
        height, width = (PIXELS * side for side in noisy.shape[-2:])
        added = {"resolution": _each(noisy, height, width), "aspect_ratio": _each(noisy, height / width)}
    return module.forward(
        noisy, text["states"], times, added_cond_kwargs=added, encoder_attention_mask=text["mask"]
    ).sample


def _flux(module: Any, noisy: torch.Tensor, times: torch.Tensor, labels: Any, text: Text) -> Any:
    batch, channels, height, width = noisy.shape
    _check_packing(module, noisy)
    tokens = noisy.reshape(batch, channels, height // PACKED, PACKED, width // PACKED, PACKED)
    tokens = tokens.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PACKED**2)
    shares = [times.float() / 1000]
    if module.config.guidance_embeds:
        shares.append(torch.full_like(shares[0], module.told_guidance))
    module.time_text_embed.exact_times = [share * 1000 for share in shares]
    try:
        found = module.forward(
            tokens,
            text["states"],
            text["pooled"],
            shares[0],
            img_ids=_places(height // PACKED, width // PACKED, noisy.device),
            txt_ids=torch.zeros(text["states"].shape[1], 3, device=noisy.device),
            guidance=shares[1] if len(shares) > 1 else None,
        ).sample
    finally:
        module.time_text_embed.exact_times = None
    found = found.reshape(batch, height // PACKED, width // PACKED, -1, PACKED, PACKED)
    return found.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, height, width)


def _check_packing(module: Any, noisy: torch.Tensor) -> None:
    channels, height, width = noisy.shape[1:]
    if height % PACKED or width % PACKED or channels * PACKED**2 != module.config.in_channels:
        raise DataError(
            f"images: {module.class_name} packs patches of {PACKED} x {PACKED} into tokens of "
            f"{module.config.in_channels} values, so it takes {module.image_channels} channels and even sides; found "
            f"{channels} x {height} x {width}. Change the data, or from scratch set model.overrides.in_channels to "
            f"{PACKED**2} times the channels."
        )


def _places(height: int, width: int, device: torch.device) -> torch.Tensor:
    """(height * width, 3): the position of each token; the first number is for several images."""
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).reshape(-1, 2).float()
    return nn.functional.pad(grid, (1, 0))


def _labels(module: Any, times: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor | None:
    if module.num_classes is None:
        return None
    return torch.full_like(times, module.null_label).long() if labels is None else labels


def _each(like: torch.Tensor, *numbers: float) -> torch.Tensor:
    """The same numbers for every sample."""
    return torch.stack([torch.full((len(like),), float(number), device=like.device) for number in numbers], dim=1)


Call = Callable[[Any, torch.Tensor, torch.Tensor, Any, Any], Any]
CALLS: dict[str, Call] = {DIT: _dit, UNET: _unet, UNET_TEXT: _unet_text, SD3: _sd3, PIXART: _pixart, FLUX: _flux}
"""By class name: (module, noisy, times, labels, text) -> (B, C, H, W), followed by a variance if there is one. Only
PixArt gets the text mask: in the pipelines of the others the model attends to the padding too."""
