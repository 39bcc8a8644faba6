"""What objectives of denoising share: the betas of DDPM, and what a denoiser is given of a batch.

A denoiser has the method `denoise(noisy, timesteps, labels, text=...)`; `num_classes` is None where it takes no labels,
and `null_label`, where it has one, is the label that means none; `text_width` and `pooled_width` are None where it
takes no texts. What means no text comes in a batch as `empty_states`, `empty_mask` and `empty_pooled`, or as
`empty_tokens`, with one row; without them it is zeros. Frozen models beside the denoiser come by name: `vae`, and
`text[0]`, `text[1]`, ... for text encoders. Must not know a model's class, optimizers or ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

from fullshard.errors import RecipeError
from fullshard.families.diffusion.keyed_noise import LABEL_DROP, uniform
from fullshard.families.diffusion.text.encoder_model import encoded

Betas = Literal["linear", "cosine"]
Prediction = Literal["epsilon", "v"]
Text = dict[str, torch.Tensor]
"""States (B, T, D), their mask (B, T), and pooled (B, P) where the model takes one vector for the whole text, too."""

LABELS_DROPPED = 0.1
"""The share of labels and texts that is dropped where the recipe names none and the model knows what means none."""


@functools.cache
def alphas_cumprod(betas: Betas, num_timesteps: int, device: torch.device) -> torch.Tensor:
    """(num_timesteps,) fp32: the share of the image in the variance of a noisy one, as diffusers' DDPMScheduler has it
    for its linear and squaredcos_cap_v2 betas."""
    if betas == "linear":
        each = torch.linspace(1e-4, 0.02, num_timesteps, dtype=torch.float32)
    else:

        def left(share: float) -> float:
            return math.cos((share + 0.008) / 1.008 * math.pi / 2) ** 2

        ends = [left(step / num_timesteps) for step in range(num_timesteps + 1)]
        steps = zip(ends, ends[1:], strict=False)
        each = torch.tensor([min(1 - after / before, 0.999) for before, after in steps], dtype=torch.float32)
    return (1 - each).cumprod(0).to(device)


def noised(images: torch.Tensor, noise: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Images with noise, where `kept` (B,) is the image's share of the variance."""
    return _wide(kept.sqrt(), images) * images + _wide((1 - kept).sqrt(), images) * noise


def velocity(images: torch.Tensor, noise: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """What v-prediction predicts."""
    return _wide(kept.sqrt(), images) * noise - _wide((1 - kept).sqrt(), images) * images


def min_snr_weights(kept: torch.Tensor, gamma: float, prediction: Prediction) -> torch.Tensor:
    """(B,): what a sample's loss is multiplied by, so that as an error of the image it counts at most `gamma`."""
    snr = kept / (1 - kept)
    return snr.clamp(max=gamma) / (snr if prediction == "epsilon" else snr + 1)


@dataclass(frozen=True)
class Given:
    """What a denoiser gets of a batch."""

    images: torch.Tensor
    labels: torch.Tensor | None
    text: Text | None


def given(
    model: Any, batch: dict[str, Any], *, label_drop: float | None, aux: Mapping[str, Any] = MappingProxyType({})
) -> Given:
    """Images, or what a VAE in `aux` makes of them, labels and texts; some of these two are replaced by what means
    none, both of a sample together. Fillers are blank, so that nothing that they happen to hold reaches the model."""
    real = batch["sample_ids"] >= 0
    images = torch.where(_wide(real, batch["images"]), batch["images"].float(), 0.0)
    if "vae" in aux:
        with torch.no_grad():
            images = aux["vae"].encode_images(images)
    share = _drop_rate(model, label_drop)
    dropped = uniform(batch["draws"], LABEL_DROP) < share if share else torch.zeros_like(real)
    labels = None
    if getattr(model, "num_classes", None) is not None:
        labels = torch.where(real, batch["label"], 0)
        if share and model.null_label is not None:
            labels = torch.where(dropped, model.null_label, labels)
    text = None
    if getattr(model, "text_width", None) is not None:
        text = without(*texts_of(model, batch, aux), dropped | ~real)
    return Given(images, labels, text)


def texts_of(model: Any, batch: dict[str, Any], aux: Mapping[str, Any] = MappingProxyType({})) -> tuple[Text, Text]:
    """The texts of a batch, in the parts that the model takes, and the one that means none, with one row. Tokens become
    states by the text encoders in `aux`, on all ranks together."""
    if "text_tokens" in batch:
        batch = _encoded(batch, [part for name, part in aux.items() if name.startswith("text[")])
        require_texts(model, batch)
    parts = ["states", "mask"]
    if getattr(model, "pooled_width", None) is not None:
        parts.append("pooled")
    text = {name: batch[f"text_{name}"] for name in parts}
    if "empty_states" in batch:
        return text, {name: batch[f"empty_{name}"] for name in parts}
    # Zeros, every one of them a token that the model looks at: as SDXL's pipeline has it.
    zeros = {name: torch.zeros_like(part[:1]) for name, part in text.items()}
    return text, {**zeros, "mask": torch.ones_like(text["mask"][:1])}


def _encoded(batch: dict[str, Any], encoders: Sequence[Any]) -> dict[str, Any]:
    """States of the tokens of a batch, and of the empty text where it is not zeros, in one pass."""
    tokens = [batch[name] for name in ("text_tokens", "empty_tokens") if name in batch]
    found, rows = encoded(encoders, torch.cat(tokens)), len(tokens[0])
    states = {f"text_{name}": part[:rows] for name, part in found.items()}
    return states | ({f"empty_{name}": part[rows:] for name, part in found.items()} if len(tokens) > 1 else {})


def without(text: Text, none: Text, dropped: torch.Tensor) -> Text:
    """Texts of which those that `dropped` (B,) says are replaced by the one that means none."""
    return {name: torch.where(_wide(dropped, part), none[name], part) for name, part in text.items()}


def denoised(
    model: Any, noisy: torch.Tensor, timesteps: torch.Tensor, labels: torch.Tensor | None, text: Text | None
) -> torch.Tensor:
    """What the model predicts; one that takes no texts need not have an argument for them."""
    found: torch.Tensor = model.denoise(noisy, timesteps, labels, **({} if text is None else {"text": text}))
    return found


def _drop_rate(model: Any, label_drop: float | None) -> float:
    """The share of labels and texts that is dropped, as the recipe says or by what the model knows."""
    if label_drop is not None:
        return label_drop
    return LABELS_DROPPED if knows_none(model) else 0.0


def knows_none(model: Any) -> bool:
    """Whether there is something to say in place of a label or a text: for texts there always is."""
    return getattr(model, "null_label", None) is not None or getattr(model, "text_width", None) is not None


def sum_of_means(apart: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """The sum over samples, fillers left out, of the mean over a sample's elements."""
    return torch.where(batch["sample_ids"] >= 0, apart.flatten(1).mean(1), 0.0).sum()


def require_texts(model: Any, batch: dict[str, Any]) -> None:
    """Refuses states of texts that are not those that the model takes."""
    states, pooled = (batch[key].shape[-1] if key in batch else None for key in ("text_states", "text_pooled"))
    takes, takes_pooled = model.text_width, getattr(model, "pooled_width", None)
    if takes != states:
        raise RecipeError(
            f"data.encode.text gives states of {states}, and {name_of(model)} takes {takes}. Choose the text encoder "
            "that the model was made for."
        )
    if takes_pooled is not None and takes_pooled != pooled:
        raise RecipeError(
            f"{name_of(model)} takes a vector of {takes_pooled} for a whole text, and data.encode.text gives "
            f"{'none' if pooled is None else pooled}. Name an encoder that gives it, such as CLIP, before that of the "
            "states: data.encode.text: [{path: CLIP}, {path: T5}]."
        )


def name_of(model: Any) -> str:
    return type(model).__name__.removeprefix("FSDP")


def _wide(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, *(1,) * (like.dim() - 1))


__all__ = [
    "Betas",
    "Given",
    "Prediction",
    "Text",
    "alphas_cumprod",
    "denoised",
    "given",
    "knows_none",
    "name_of",
    "min_snr_weights",
    "noised",
    "require_texts",
    "sum_of_means",
    "texts_of",
    "velocity",
    "without",
]
