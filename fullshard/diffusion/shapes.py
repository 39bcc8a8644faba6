"""Denoisers of diffusers by class and named size. Must not know weights, losses or ranks."""

from __future__ import annotations

from typing import Any

from fullshard.errors import RecipeError
from fullshard.part import did_you_mean

ALIASES = {"dit": "DiTTransformer2DModel", "unet": "UNet2DModel"}
"""Short names of classes."""
CONDITIONED = ("DiTTransformer2DModel", "UNet2DModel")
"""Classes whose forward takes a label, or nothing, beside the image and the time."""
_WIDTHS = {
    "tiny": {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16},
    "S": {"num_layers": 12, "num_attention_heads": 6, "attention_head_dim": 64},
    "B": {"num_layers": 12, "num_attention_heads": 12, "attention_head_dim": 64},
    "L": {"num_layers": 24, "num_attention_heads": 16, "attention_head_dim": 64},
    "XL": {"num_layers": 28, "num_attention_heads": 16, "attention_head_dim": 72},
}
_PATCHES = (2, 4, 8)
_TINY_UNET = {
    "block_out_channels": [16, 32],
    "down_block_types": ["DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
    "layers_per_block": 1,
    "norm_num_groups": 8,
}


def class_of(name: str) -> Any:
    """A model class of diffusers by its name, or a short one."""
    import diffusers

    known = [*ALIASES, *CONDITIONED]
    wanted = ALIASES.get(name, name)
    found = getattr(diffusers, wanted, None) if wanted.endswith("Model") else None
    if found is None:
        raise RecipeError(
            f"model.architecture = {name!r} is no denoiser that is known{did_you_mean(name, known)}. Known: "
            f"{', '.join(known)}."
        )
    if wanted not in CONDITIONED:
        raise RecipeError(
            f"model.architecture = {name!r} is conditioned on more than a label, which is not supported yet. "
            f"Supported: {', '.join(CONDITIONED)}."
        )
    return found


def named_size(class_name: str, size: str) -> dict[str, Any]:
    """The settings of a named size: `XL/2` is the width XL with patches of 2 pixels; `tiny` exists for every class."""
    if class_name == "UNet2DModel":
        if size != "tiny":
            raise RecipeError(f"model.size = {size!r} is not known for {class_name}. Known: tiny; others in overrides.")
        return dict(_TINY_UNET)
    width, _, patch = size.partition("/")
    sizes = ["tiny", *(f"{name}/{number}" for name in list(_WIDTHS)[1:] for number in _PATCHES)]
    if size not in (*sizes, "tiny/2", "tiny/4"):
        raise RecipeError(
            f"model.size = {size!r} is not known for {class_name}{did_you_mean(size, sizes)}. "
            f"Known: {', '.join(sizes)}."
        )
    return {**_WIDTHS[width], "patch_size": int(patch or 2)}


def completed(class_name: str, settings: dict[str, Any], *, classes: int | None, where: str) -> dict[str, Any]:
    """Settings of the class, with a row for every class and one for none; what the class does not know is refused."""
    import inspect

    found = dict(settings)
    known = [name for name in inspect.signature(class_of(class_name).__init__).parameters if name != "self"]
    if class_name == "DiTTransformer2DModel":
        found["num_embeds_ada_norm"] = classes if classes is not None else found.get("num_embeds_ada_norm", 1)
        # What diffusers fills in later, with a word about the future.
        found.setdefault("out_channels", found.get("in_channels", 4))
    elif classes is not None:
        found["num_class_embeds"] = classes + 1
    for name in found:
        if not name.startswith("_") and name not in known:
            raise RecipeError(
                f"{where}.{name} is no setting of {class_name}{did_you_mean(name, known)}. Known: {', '.join(known)}."
            )
    return found
