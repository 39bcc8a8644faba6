"""A small denoiser of each class, what it is given, and how diffusers' own pipelines call it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.config.part import decode
from fullshard.contracts.model import Family

CHANNELS, SIDE, TOKENS, WIDTH, POOLED = 4, 8, 5, 24, 20
IMAGES = {"sample_size": SIDE, "in_channels": CHANNELS}
JOINT = {"joint_attention_dim": WIDTH, "pooled_projection_dim": POOLED}
SDXL = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": POOLED + 6 * 8,
}
CASES: dict[str, dict[str, Any]] = {
    "dit": {"architecture": "dit", "overrides": IMAGES, "classes": 10},
    "unet": {"architecture": "unet", "overrides": IMAGES, "classes": 10},
    "sd3": {"architecture": "sd3", "overrides": {**IMAGES, **JOINT, "pos_embed_max_size": 8}},
    "flux": {"architecture": "flux", "overrides": {**JOINT, "in_channels": 4 * CHANNELS}},
    "flux-guided": {"architecture": "flux", "overrides": {**JOINT, "guidance_embeds": True}, "guidance": 2.5},
    "pixart": {"architecture": "pixart", "overrides": {**IMAGES, "caption_channels": WIDTH}},
    "pixart-sized": {
        "architecture": "pixart",
        # Two numbers beside the size of a head: the model's width is cut in three for the sizes.
        "overrides": {
            **IMAGES,
            "caption_channels": WIDTH,
            "use_additional_conditions": True,
            "num_attention_heads": 3,
            "out_channels": 2 * CHANNELS,
        },
    },
    "unet_text": {"architecture": "unet_text", "overrides": {**IMAGES, "cross_attention_dim": WIDTH}, "classes": 10},
    "sdxl": {"architecture": "unet_text", "overrides": {**IMAGES, "cross_attention_dim": WIDTH, **SDXL}},
}
CLASSES = ("dit", "unet", "sd3", "flux", "pixart", "unet_text")
"""One case for each class."""


def family(name: str, **settings: Any) -> Any:
    chosen = {"kind": "diffusers", **CASES[name], **settings}
    return decode(Family, chosen if "path" in settings else {"size": "tiny", **chosen}, where="model")


def stored(path: Any, **settings: Any) -> Any:
    return decode(Family, {"kind": "diffusers", "path": str(path), **settings}, where="model")


def real(chosen: Any, *, seed: int = 0) -> Any:
    """The module on the CPU, each parameter away from its first value: many of those are zero."""
    module: nn.Module = chosen.build(processor=None)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device="cpu")
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        chosen.initialise(module, root=module)
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


def plain(module: Any) -> Any:
    """diffusers' own model with the values of ours."""
    import diffusers

    found = getattr(diffusers, module.class_name).from_config(module.config)
    found.load_state_dict(module.state_dict())
    return found.eval()


def inputs(module: Any, num: int = 3) -> tuple[torch.Tensor, torch.Tensor, Any, Any]:
    draw = torch.Generator().manual_seed(1)
    noisy = torch.randn(num, CHANNELS, SIDE, SIDE, generator=draw)
    times = torch.arange(num) * 331 + 5
    labels = None if module.num_classes is None else torch.arange(num)
    if module.text_width is None:
        return noisy, times, labels, None
    mask = torch.arange(TOKENS)[None] < torch.arange(num)[:, None] + 2
    text = {"states": torch.randn(num, TOKENS, WIDTH, generator=draw), "mask": mask}
    if module.pooled_width is not None:
        text["pooled"] = torch.randn(num, POOLED, generator=draw)
    return noisy, times, labels, text


def by_hand(name: str, model: Any, noisy: torch.Tensor, times: torch.Tensor, labels: Any, text: Any) -> torch.Tensor:
    """As the pipeline of the class does it."""
    size = [8.0 * SIDE, 8.0 * SIDE]
    if name in ("dit", "unet"):
        found = model(noisy, times, class_labels=labels).sample
    elif name == "sd3":
        given = {"encoder_hidden_states": text["states"], "pooled_projections": text["pooled"]}
        found = model(hidden_states=noisy, timestep=times, **given).sample
    elif name.startswith("pixart"):
        added: dict[str, Any] = {"resolution": None, "aspect_ratio": None}
        if name == "pixart-sized":
            added = {"resolution": torch.tensor([size] * 3), "aspect_ratio": torch.ones(3, 1)}
        given = {"encoder_hidden_states": text["states"], "encoder_attention_mask": text["mask"]}
        found = model(noisy, timestep=times, added_cond_kwargs=added, **given).sample
    elif name.startswith("flux"):
        found = flux_by_hand(model, noisy, times, text, 2.5 if name == "flux-guided" else None)
    else:
        added = {"text_embeds": text.get("pooled"), "time_ids": torch.tensor([[*size, 0.0, 0.0, *size]] * 3)}
        given = {"added_cond_kwargs": added} if name == "sdxl" else {"class_labels": labels}
        found = model(noisy, times, encoder_hidden_states=text["states"], **given).sample
    return found[:, :CHANNELS]


def flux_by_hand(model: Any, noisy: torch.Tensor, times: torch.Tensor, text: Any, guidance: float | None) -> Any:
    from diffusers import FluxPipeline

    num = len(noisy)
    packed = model(
        hidden_states=FluxPipeline._pack_latents(noisy, num, CHANNELS, SIDE, SIDE),
        timestep=times / 1000,
        guidance=None if guidance is None else torch.full([num], guidance),
        pooled_projections=text["pooled"],
        encoder_hidden_states=text["states"],
        txt_ids=torch.zeros(TOKENS, 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(num, SIDE // 2, SIDE // 2, "cpu", torch.float32),
    ).sample
    return FluxPipeline._unpack_latents(packed, SIDE, SIDE, 1)
