"""A frozen text encoder of Transformers: tokens to states, and how the states of several encoders are combined.

Must not know texts, tokenizers, data, losses or ranks.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.errors import RecipeError
from fullshard.families.diffusion.pipeline_parts import CONFIG
from fullshard.families.diffusion.text.encoder_stack import NO_TOKEN, Join
from fullshard.hf.weights.safetensors_folder import open_folder
from fullshard.hf.weights.stored_weights import StoredWeights

Encoded = dict[str, torch.Tensor]
"""`states` (B, T, D), `mask` (B, T), and `pooled` (B, P) if an encoder has a pooled output."""
_TEXT_SIDE = {"CLIPModel": "CLIPTextModel", "SiglipModel": "SiglipTextModel"}
"""Vision-language models, and the class of their text tower."""


def class_of(folder: Path) -> Any:
    """The class that builds and loads the encoder of a folder: its own, or that of its text tower."""
    import transformers

    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    name = (config.get("architectures") or [""])[0]
    # T5 and the like are loaded without their decoder.
    usual = transformers.AutoModelForTextEncoding if "ForConditional" in name else transformers.AutoModel
    found = getattr(transformers, _TEXT_SIDE.get(name, name), None) if "For" not in name else None
    return found or usual


def empty(folder: Path) -> nn.Module:
    """The module on meta."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    loader, config = class_of(folder), AutoConfig.from_pretrained(folder)
    build = getattr(loader, "from_config", None) or loader._from_config
    if (own := getattr(loader, "config_class", None)) is not None and not isinstance(config, own):
        config = own.from_pretrained(folder)
    config.dtype = torch.float32
    with init_empty_weights(include_buffers=False):
        module: Any = build(config)
    module.tie_weights()
    return module.requires_grad_(False).eval()  # type: ignore[no-any-return]


def load(folder: Path, *, dtype: torch.dtype, device: torch.device) -> Any:
    """The whole encoder on one device."""
    module = class_of(folder).from_pretrained(folder, dtype=dtype)
    return module.requires_grad_(False).eval().to(device)


def is_clip_folder(folder: Path) -> bool:
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return "clip" in str(config.get("model_type", ""))


def bind(module: Any, *, tokens: int, fill: int, padded: bool, early: bool, join: Join) -> Any:
    """Gives the module its method `encode_texts`. `tokens`: the length of every text; `fill`: the padding token;
    `padded`: whether padding counts as text; `early`: whether states come from the second-to-last layer; `join`: how
    several encoders are combined."""
    module.text_tokens, module.text_fill, module.text_padded = tokens, fill, padded
    module.text_early, module.text_join = early, join
    module.encode_texts = types.MethodType(encode_texts, module)
    return module


def encode_texts(module: Any, tokens: torch.Tensor) -> Encoded:
    """Encodes tokens (B, T), padded with NO_TOKEN; fp32. States of masked positions are zero."""
    there = tokens != NO_TOKEN
    ids = torch.where(there, tokens, module.text_fill)
    mask = torch.ones_like(there) if module.text_padded else there
    more: dict[str, Any] = {} if module.text_padded else {"attention_mask": there.long()}
    with _noting(module) as before:
        output = module(input_ids=ids, **more)
    states = before[0] if module.text_early else output.last_hidden_state
    found = {"states": torch.where(mask[..., None], states.float(), 0.0), "mask": mask}
    pooled = _pooled(output)
    return found if pooled is None else {**found, "pooled": pooled.float().clone()}


@contextmanager
def _noting(module: Any) -> Iterator[list[torch.Tensor]]:
    """Records the input of the last layer if `text_early`. Transformers finds layers by class name, which sharding
    changes; here it is the last of the longest ModuleList."""
    found: list[torch.Tensor] = []
    if not module.text_early:
        yield found
        return

    def note(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])

    layers = max((part for part in module.modules() if isinstance(part, nn.ModuleList)), key=len)
    hook = layers[-1].register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield found
    finally:
        hook.remove()


def _pooled(output: Any) -> torch.Tensor | None:
    """The pooled output, projected if the encoder does that."""
    for name in ("text_embeds", "pooler_output"):
        if (found := getattr(output, name, None)) is not None:
            return found  # type: ignore[no-any-return]
    return None


@torch.no_grad()
def encoded(encoders: Sequence[Any], tokens: torch.Tensor) -> Encoded:
    """The combined states of all encoders, whose tokens are concatenated along the second axis."""
    shares = tokens.split([encoder.text_tokens for encoder in encoders], dim=1)
    found = [encoder.encode_texts(share) for encoder, share in zip(encoders, shares, strict=True)]
    return joined(found, encoders[-1].text_join)


def joined(found: Sequence[Encoded], join: Join) -> Encoded:
    """flux: states of the last, pooled of the first that gives one. sdxl: states side by side, pooled of the last.
    sd3: states side by side, zero-padded to the width of the last encoder's, whose tokens follow; pooled side by
    side."""
    pooled = [each["pooled"] for each in found if "pooled" in each]
    if join == "flux":
        return _with(found[-1], pooled[:1])
    if join == "sdxl":
        return _with(_side_by_side(found), pooled[-1:])
    clip, last = _side_by_side(found[:-1]), found[-1]
    missing = last["states"].shape[-1] - clip["states"].shape[-1]
    if missing < 0:
        raise RecipeError(
            f"data.encode.join = sd3: states of {clip['states'].shape[-1]} are wider than those of the last encoder "
            f"({last['states'].shape[-1]}). Name the widest, T5, last."
        )
    states = torch.cat([F.pad(clip["states"], (0, missing)), last["states"]], dim=1)
    return _with({"states": states, "mask": torch.cat([clip["mask"], last["mask"]], dim=1)}, pooled)


def _side_by_side(found: Sequence[Encoded]) -> Encoded:
    return {"states": torch.cat([each["states"] for each in found], dim=-1), "mask": found[0]["mask"]}


def _with(found: Encoded, pooled: Sequence[torch.Tensor]) -> Encoded:
    whole = {"pooled": torch.cat(list(pooled), dim=-1)} if pooled else {}
    return {"states": found["states"], "mask": found["mask"], **whole}


class TextWeights(StoredWeights):
    """The stored tensors of a text encoder; others in its folder, such as a decoder or a vision tower, are ignored."""

    def __init__(self, folder: Path, module: nn.Module) -> None:
        advice = "Check that config.json belongs to these weights."
        super().__init__(open_folder(folder), module, place=folder, advice=advice, headless=True)

    def _is_head(self, name: str) -> bool:
        return True
