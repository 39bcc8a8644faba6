"""A frozen AutoencoderKL of diffusers: images to latents, and back.

Latents are the mode of the posterior, shifted and scaled as the VAE's config says. Must not know data, losses or ranks.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.errors import RecipeError
from fullshard.families.diffusion.pipeline_parts import CONFIG
from fullshard.hf.weights.safetensors_folder import open_folder
from fullshard.hf.weights.stored_weights import NamedWeights

CLASS = "AutoencoderKL"
_RENAMED = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}
"""Old names of attention layers; most VAEs in use have them."""


def read_settings(folder: Path, *, where: str) -> dict[str, Any]:
    """The config of a stored VAE, without diffusers' private keys."""
    stored = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if stored.get("_class_name") != CLASS:
        raise RecipeError(
            f"{where}: {folder / CONFIG} has the class {stored.get('_class_name')}, and only {CLASS} is supported. "
            "Name the folder of one, or of a pipeline that has one."
        )
    return {key: value for key, value in stored.items() if not key.startswith("_")}


def empty(settings: Mapping[str, Any]) -> nn.Module:
    """The module on meta, with the methods `encode_images` and `decode_latents`."""
    from accelerate import init_empty_weights
    from diffusers import AutoencoderKL

    with init_empty_weights(include_buffers=False):
        module: Any = AutoencoderKL.from_config(dict(settings))
    module.encode_images = types.MethodType(encode_images, module)
    module.decode_latents = types.MethodType(decode_latents, module)
    return module.requires_grad_(False).eval()  # type: ignore[no-any-return]


def load(folder: Path, *, device: torch.device, where: str) -> Any:
    """The whole VAE on one device, in fp32."""
    module = empty(read_settings(folder, where=where))
    weights = vae_weights(folder, module, where=where)
    values = {name: weights.whole(name).to(device, torch.float32) for name in weights.names()}
    module.load_state_dict(values, assign=True)
    return module.requires_grad_(False)


def encode_images(module: Any, images: torch.Tensor) -> torch.Tensor:
    """(B, C, H, W) from -1 to 1 to latents, fp32."""
    mode: torch.Tensor = module.encode(images).latent_dist.mode()
    shift, scale = _numbers(module.config, images.device)
    return (mode.float() - shift) * scale


def decode_latents(module: Any, latents: torch.Tensor) -> torch.Tensor:
    """Latents to images, roughly from -1 to 1."""
    shift, scale = _numbers(module.config, latents.device)
    found: torch.Tensor = module.decode(latents / scale + shift).sample
    return found.float().clone()


def _numbers(config: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Shift and scale of latents, per channel if the VAE stores them that way."""
    scale = torch.tensor(float(config.scaling_factor), device=device)
    mean, deviation = config.get("latents_mean"), config.get("latents_std")
    if mean is not None and deviation is not None:
        each = torch.tensor([mean, deviation], dtype=torch.float32, device=device)[..., None, None]
        return each[0], scale / each[1]
    return torch.tensor(float(config.get("shift_factor") or 0.0), device=device), scale


def factor(settings: Mapping[str, Any]) -> int:
    """Pixels per side of an image that become one of a latent."""
    return int(2 ** (len(settings["block_out_channels"]) - 1))


def latent_shape(settings: Mapping[str, Any], shape: Sequence[int]) -> tuple[int, int, int]:
    """The latent's shape for an image of (C, H, W). Raises ValueError with a predicate ('has 1 channels ...') if the
    VAE cannot encode it."""
    channels, height, width = shape
    by, wanted = factor(settings), settings["in_channels"]
    if channels != wanted:
        raise ValueError(f"has {channels} channels, but the VAE takes {wanted}. Set data.encode.channels = {wanted}")
    if height % by or width % by or not height or not width:
        raise ValueError(
            f"is {height} x {width} pixels, but the VAE needs multiples of {by}. Set data.encode.size to a multiple "
            f"of {by}"
        )
    return int(settings["latent_channels"]), height // by, width // by


def vae_weights(folder: Path, module: nn.Module, *, where: str) -> NamedWeights:
    """Stored tensors by the module's parameter names, in the old or the new naming."""
    stored = open_folder(folder)
    return NamedWeights(
        stored,
        {_renamed(name): name for name in stored},
        {name: tuple(tensor.shape) for name, tensor in module.state_dict(keep_vars=True).items()},
        what=f"{where}: {folder} does not hold the tensors of its own {CONFIG}",
        advice="Fetch or save the VAE again.",
    )


def _renamed(name: str) -> str:
    for before, now in _RENAMED.items():
        name = name.replace(before, now) if ".attentions." in name else name
    return name
