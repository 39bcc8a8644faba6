"""What a denoiser gets from a batch: images or latents, labels and texts, some of them dropped for guidance.

A denoiser has the method `denoise(noisy, timesteps, labels, text=...)`. `num_classes` is None if it takes no labels,
`null_label` is the label for "no class"; `text_width` and `pooled_width` are None if it takes no texts. The empty text
comes with the batch as `empty_states`, `empty_mask` and `empty_pooled`, or as `empty_tokens`, with one row; without
them it is zeros. Frozen models come by name: `vae`, and `text[0]`, `text[1]`, ... for text encoders. Must not know
model classes, optimizers or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fullshard.errors import RecipeError
from fullshard.families.diffusion.keyed_noise import LABEL_DROP, uniform

if TYPE_CHECKING:
    import torch

Text = dict[str, "torch.Tensor"]
"""`states` (B, T, D), `mask` (B, T), and `pooled` (B, P) where the model also takes one vector for the whole text."""

LABELS_DROPPED = 0.1
"""The share of labels and texts that is dropped where the recipe does not say and the model can be unconditional."""


@dataclass(frozen=True)
class DenoiserInputs:
    """A denoiser's inputs, without noise."""

    images: torch.Tensor
    labels: torch.Tensor | None
    text: Text | None


def inputs_of(
    model: Any, batch: dict[str, Any], *, label_drop: float | None, aux: Mapping[str, Any] = MappingProxyType({})
) -> DenoiserInputs:
    """Images (or latents, with a VAE in `aux`), labels and texts; label and text of a sample are dropped together.
    Filler samples are blanked, so that their content never reaches the model."""
    import torch

    real = batch["sample_ids"] >= 0
    images = torch.where(_per_sample(real, batch["images"]), batch["images"].float(), 0.0)
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
    return DenoiserInputs(images, labels, text)


def texts_of(model: Any, batch: dict[str, Any], aux: Mapping[str, Any] = MappingProxyType({})) -> tuple[Text, Text]:
    """The texts of a batch, with the parts that the model takes, and the empty text, with one row. Text encoders in
    `aux` turn tokens into states, on all ranks together."""
    import torch

    if "text_tokens" in batch:
        batch = _encoded(batch, [part for name, part in aux.items() if name.startswith("text[")])
        require_texts(model, batch)
    parts = ["states", "mask"]
    if getattr(model, "pooled_width", None) is not None:
        parts.append("pooled")
    text = {name: batch[f"text_{name}"] for name in parts}
    if "empty_states" in batch:
        return text, {name: batch[f"empty_{name}"] for name in parts}
    # As in SDXL's pipeline: zeros, and the model attends to every one of them.
    zeros = {name: torch.zeros_like(part[:1]) for name, part in text.items()}
    return text, {**zeros, "mask": torch.ones_like(text["mask"][:1])}


def _encoded(batch: dict[str, Any], encoders: Sequence[Any]) -> dict[str, Any]:
    """States of the batch's tokens, and of the empty text unless it is zeros, in one pass."""
    import torch

    from fullshard.families.diffusion.text.encoder_model import encoded

    tokens = [batch[name] for name in ("text_tokens", "empty_tokens") if name in batch]
    found, rows = encoded(encoders, torch.cat(tokens)), len(tokens[0])
    states = {f"text_{name}": part[:rows] for name, part in found.items()}
    return states | ({f"empty_{name}": part[rows:] for name, part in found.items()} if len(tokens) > 1 else {})


def without(text: Text, empty: Text, dropped: torch.Tensor) -> Text:
    """Texts, with the empty text in place of those that `dropped` (B,) marks."""
    import torch

    return {name: torch.where(_per_sample(dropped, part), empty[name], part) for name, part in text.items()}


def denoised(
    model: Any, noisy: torch.Tensor, timesteps: torch.Tensor, labels: torch.Tensor | None, text: Text | None
) -> torch.Tensor:
    """The model's prediction. `denoise` of a model without texts need not have the argument."""
    found: torch.Tensor = model.denoise(noisy, timesteps, labels, **({} if text is None else {"text": text}))
    return found


def _drop_rate(model: Any, label_drop: float | None) -> float:
    if label_drop is not None:
        return label_drop
    return LABELS_DROPPED if can_be_unconditional(model) else 0.0


def can_be_unconditional(model: Any) -> bool:
    """Whether a label or a text can be dropped: a text always can."""
    return getattr(model, "null_label", None) is not None or getattr(model, "text_width", None) is not None


def sum_of_means(apart: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """The sum over samples, without fillers, of the mean over a sample's elements."""
    import torch

    return torch.where(batch["sample_ids"] >= 0, apart.flatten(1).mean(1), 0.0).sum()


def require_texts(model: Any, batch: dict[str, Any]) -> None:
    """Raises RecipeError if the text states do not have the widths that the model takes."""
    states, pooled = (batch[key].shape[-1] if key in batch else None for key in ("text_states", "text_pooled"))
    takes, takes_pooled = model.text_width, getattr(model, "pooled_width", None)
    if takes != states:
        raise RecipeError(
            f"data.encode.text gives states of width {states}, but {name_of(model)} takes {takes}. Choose the text "
            "encoder that the model was made for."
        )
    if takes_pooled is not None and takes_pooled != pooled:
        raise RecipeError(
            f"{name_of(model)} takes a pooled vector of width {takes_pooled}, but data.encode.text gives "
            f"{'none' if pooled is None else pooled}. Name an encoder with a pooled output, such as CLIP, before the "
            "one for the states: data.encode.text: [{path: CLIP}, {path: T5}]."
        )


def name_of(model: Any) -> str:
    return type(model).__name__.removeprefix("FSDP")


def _per_sample(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, *(1,) * (like.dim() - 1))
