"""The supported denoisers of diffusers, by class and named size. Must not know weights, losses or ranks."""

from __future__ import annotations

from typing import Any

from fullshard.config.part import did_you_mean
from fullshard.errors import RecipeError

DIT, UNET = "DiTTransformer2DModel", "UNet2DModel"
SD3, FLUX, PIXART, UNET_TEXT = (
    "SD3Transformer2DModel",
    "FluxTransformer2DModel",
    "PixArtTransformer2DModel",
    "UNet2DConditionModel",
)
ALIASES = {"dit": DIT, "unet": UNET, "sd3": SD3, "flux": FLUX, "pixart": PIXART, "unet_text": UNET_TEXT}
"""Short names of classes."""
LABELLED = (DIT, UNET, UNET_TEXT)
"""Classes that can take a label."""
PACKED = 2
"""Flux packs patches of this side length into the channels of one token."""
_WIDTHS = {
    "tiny": {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16},
    "S": {"num_layers": 12, "num_attention_heads": 6, "attention_head_dim": 64},
    "B": {"num_layers": 12, "num_attention_heads": 12, "attention_head_dim": 64},
    "L": {"num_layers": 24, "num_attention_heads": 16, "attention_head_dim": 64},
    "XL": {"num_layers": 28, "num_attention_heads": 16, "attention_head_dim": 72},
}
_PATCHES = (2, 4, 8)
_TEXTS = {"joint_attention_dim": 32, "pooled_projection_dim": 32}
_UNETS = {"block_out_channels": [16, 32], "layers_per_block": 1, "norm_num_groups": 8}
_TINY: dict[str, dict[str, Any]] = {
    UNET: {
        **_UNETS,
        "down_block_types": ["DownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "UpBlock2D"],
    },
    UNET_TEXT: {
        **_UNETS,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
        "cross_attention_dim": 32,
        "attention_head_dim": 2,
    },
    SD3: {**_WIDTHS["tiny"], **_TEXTS, "sample_size": 32, "in_channels": 4},
    FLUX: {**_WIDTHS["tiny"], **_TEXTS, "num_single_layers": 2, "in_channels": 4 * PACKED**2},
    PIXART: {**_WIDTHS["tiny"], "caption_channels": 32, "sample_size": 32},
}


def class_of(name: str, *, where: str = "model.architecture") -> Any:
    """A model class of diffusers by its name, or a short one."""
    import diffusers

    known = [*ALIASES, *ALIASES.values()]
    wanted = ALIASES.get(name, name)
    found = getattr(diffusers, wanted, None) if wanted.endswith("Model") else None
    if found is None:
        raise RecipeError(
            f"{where} = {name!r} is not a known denoiser{did_you_mean(name, known)}. Known: {', '.join(known)}."
        )
    if wanted not in known:
        raise RecipeError(
            f"{where} = {name!r} is a class of diffusers whose inputs are not supported yet. Supported: "
            f"{', '.join(ALIASES.values())}."
        )
    return found


def named_size(class_name: str, size: str) -> dict[str, Any]:
    """The settings of a named size: `XL/2` is width XL with patches of 2 pixels; every class has `tiny`."""
    if class_name != DIT:
        if size != "tiny":
            raise RecipeError(f"model.size = {size!r} is not known for {class_name}. Known: tiny; others in overrides.")
        return dict(_TINY[class_name])
    width, _, patch = size.partition("/")
    sizes = ["tiny", *(f"{name}/{number}" for name in list(_WIDTHS)[1:] for number in _PATCHES)]
    if size not in (*sizes, "tiny/2", "tiny/4"):
        raise RecipeError(
            f"model.size = {size!r} is not known for {class_name}{did_you_mean(size, sizes)}. "
            f"Known: {', '.join(sizes)}."
        )
    return {**_WIDTHS[width], "patch_size": int(patch or 2)}


def settings_of(class_name: str, *, where: str = "model.architecture") -> dict[str, Any]:
    """The settings of a class and their defaults."""
    import inspect

    signature = inspect.signature(class_of(class_name, where=where).__init__).parameters
    return {name: parameter.default for name, parameter in signature.items() if name != "self"}


def completed(
    class_name: str, settings: dict[str, Any], *, classes: int | None, stored: bool, where: str
) -> dict[str, Any]:
    """The given settings, with a row for every label and one for "no class"; from scratch also what follows from other
    settings. Raises RecipeError for a setting that the class does not have."""
    defaults = settings_of(class_name)
    for name in settings:
        if name not in defaults:
            raise RecipeError(
                f"{where}.{name} is not a setting of {class_name}{did_you_mean(name, list(defaults))}. "
                f"Known: {', '.join(defaults)}."
            )
    following = {} if stored and class_name != DIT else _following(class_name, {**defaults, **settings})
    return {**following, **settings, **_rows(class_name, settings, classes)}


def _following(class_name: str, of: dict[str, Any]) -> dict[str, Any]:
    """Settings that follow from others unless given: the class's own defaults fit its largest size only."""
    # A prediction has the channels of the image; no variance is trained. For DiT diffusers would assume the same, with
    # a deprecation warning.
    found: dict[str, Any] = {"out_channels": of["in_channels"]}
    if class_name in (SD3, FLUX, PIXART):
        head, width = of["attention_head_dim"], of["num_attention_heads"] * of["attention_head_dim"]
        # RoPE: the two axes of an image share most of a head's dimensions, and each rotates pairs of them.
        first = max(head // 8 // 4 * 4, 4)
        texts = of["caption_channels"] if class_name == PIXART else None
        found |= {
            SD3: {"caption_projection_dim": width},
            FLUX: {"axes_dims_rope": [first, (head - first) // 2, (head - first) // 2]},
            PIXART: {"cross_attention_dim": width} if texts is not None else {},
        }[class_name]
    return found


def implied(class_name: str, stored: dict[str, Any]) -> dict[str, Any]:
    """What a stored model's size implies, and the model must keep at another size."""
    if class_name != PIXART or stored.get("use_additional_conditions") is not None:
        return {}
    # PixArt has layers for the image size if and only if its latents are 128 x 128.
    size = stored.get("sample_size", settings_of(PIXART)["sample_size"])
    return {"use_additional_conditions": size == 128}


def _rows(class_name: str, settings: dict[str, Any], classes: int | None) -> dict[str, Any]:
    """The settings for the number of labels."""
    if classes is not None and class_name not in LABELLED:
        raise RecipeError(
            f"model.classes = {classes}, but {class_name} takes texts, not labels. Leave model.classes out, or use "
            f"one of: {', '.join(LABELLED)}."
        )
    if class_name == DIT:
        return {"num_embeds_ada_norm": classes if classes is not None else settings.get("num_embeds_ada_norm", 1)}
    return {} if classes is None else {"num_class_embeds": classes + 1}
