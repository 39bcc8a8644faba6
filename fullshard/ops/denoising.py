"""What objectives of denoising share: the betas of DDPM, what a denoiser is given of a batch, and proofs about it.

A denoiser has the method `denoise(noisy, timesteps, labels, text=...)`; `num_classes` is None where it takes no labels,
and `null_label`, where it has one, is the label that means none; `text_width` and `pooled_width` are None where it
takes no texts. Frozen models beside it come by name: `vae`, and `text[0]`, `text[1]`, ... for text encoders. Must not
know a model's class, optimizers or ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from fullshard.diffusion.text_model import encoded
from fullshard.errors import DataError, RecipeError, SetupError
from fullshard.ops.keyed_noise import LABEL_DROP, uniform

Betas = Literal["linear", "cosine"]
Prediction = Literal["epsilon", "v"]
Text = dict[str, torch.Tensor]
"""States (B, T, D), their mask (B, T), and pooled (B, P) where the model takes one vector for the whole text, too."""

LABELS_DROPPED = 0.1
"""The share of labels and texts that is dropped where the recipe names none and the model knows what means none."""
NEIGHBOURS = 10
"""Timesteps that a model is tried with before the first step: the last ones, where floating formats are coarsest. With
the first timestep that makes eleven, a number that is rarely a dimension of anything else."""


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
        text = without(texts_of(model, batch, aux), dropped | ~real)
    return Given(images, labels, text)


def texts_of(model: Any, batch: dict[str, Any], aux: Mapping[str, Any] = MappingProxyType({})) -> Text:
    """The texts of a batch, in the parts that the model takes; tokens become states by the text encoders in `aux`, on
    all ranks together."""
    if "text_tokens" in batch:
        encoders = [part for name, part in aux.items() if name.startswith("text[")]
        batch = {f"text_{name}": part for name, part in encoded(encoders, batch["text_tokens"]).items()}
        require_texts(model, batch)
    parts = {"states": "text_states", "mask": "text_mask"}
    if getattr(model, "pooled_width", None) is not None:
        parts["pooled"] = "text_pooled"
    return {name: batch[key] for name, key in parts.items()}


def without(text: Text, dropped: torch.Tensor | None = None) -> Text:
    """Texts replaced by none, which is one token of zeros and a pooled vector of zeros: those that `dropped` (B,) says,
    or all."""
    if dropped is None:
        dropped = torch.ones_like(text["mask"][:, 0])
    found = {name: torch.where(_wide(dropped, part), 0.0, part) for name, part in text.items() if name != "mask"}
    first = torch.arange(text["mask"].shape[1], device=dropped.device) == 0
    return {**found, "mask": torch.where(dropped[:, None], first, text["mask"])}


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
    return LABELS_DROPPED if _knows_none(model) else 0.0


def _knows_none(model: Any) -> bool:
    """Whether there is something to say in place of a label or a text: for texts there always is."""
    return getattr(model, "null_label", None) is not None or getattr(model, "text_width", None) is not None


def check_labels(module: Any, stored: Any) -> None:
    """Every sample has a label that the model has a row for; the record of the first that has none is named."""
    classes = getattr(module, "num_classes", None)
    if classes is None:
        return
    labels = stored.store.flat("label")[stored.chosen]
    wrong = stored.chosen[(labels < 0) | (labels >= classes)]
    if wrong.size:
        label = int(stored.store.flat("label")[wrong[0]])
        found = "no label" if label < 0 else f"the label {label}"
        raise DataError(
            f"{stored.records.where(int(stored.store.records[wrong[0]]))}: {found}, and the model has the classes 0 to "
            f"{classes - 1} ({wrong.size:,} of {len(labels):,} samples). Set model.classes to their number, or "
            "give the record another label."
        )


def sum_of_means(apart: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """The sum over samples, fillers left out, of the mean over a sample's elements."""
    return torch.where(batch["sample_ids"] >= 0, apart.flatten(1).mean(1), 0.0).sum()


def require_denoiser(module: Any, *, kind: str, label_drop: float | None) -> None:
    """Refuses a module that cannot denoise, or that knows no label for what shall be dropped."""
    if not hasattr(module, "denoise"):
        raise RecipeError(
            f"objective.kind = {kind} needs a model that denoises images, and {type(module).__name__} has no method "
            "denoise. Use model.kind: diffusers."
        )
    if label_drop and not _knows_none(module):
        raise RecipeError(
            f"objective.label_drop = {label_drop:g}, and {type(module).__name__} has no label that means none: only 0 "
            "is allowed. Leave objective.label_drop out, or give the model its classes (model.classes)."
        )


def require_vae(family: Any) -> None:
    """Refuses a frozen model that makes no latents, in words for a check of settings."""
    if family is not None and not hasattr(family, "latent_shape"):
        raise ValueError(
            f"objective.vae.kind = {family.kind()} makes no latents of images. Use objective.vae: {{kind: autoencoder, "
            "path: FOLDER}"
        )


def last_times(num: int, device: torch.device) -> torch.Tensor:
    """The middle of the first and of the last few of `num` equal parts of the time from 0 to 1; fp32."""
    steps = torch.tensor([0, *range(max(num - NEIGHBOURS, 1), num)], dtype=torch.float32, device=device)
    return (steps + 0.5) / num


def require_data(model: Any, batch: dict[str, Any], *, channels: int) -> None:
    """Refuses a first batch whose images or texts are not those that the model takes."""
    wanted = getattr(model, "image_channels", getattr(getattr(model, "config", None), "in_channels", None))
    if wanted is not None and channels != wanted:
        raise RecipeError(
            f"The images or latents of data.train have {channels} channels, and {_name(model)} takes {wanted}. Choose "
            f"other data, or give the model as many: model.overrides.in_channels={channels}."
        )
    takes = getattr(model, "text_width", None)
    has = "text_states" in batch or "text_tokens" in batch
    if takes is None and has:
        raise RecipeError(
            f"data.encode.text gives texts, and {_name(model)} takes none. Leave data.encode.text out, or choose a "
            "model that is conditioned on texts."
        )
    if takes is not None and not has:
        raise RecipeError(
            f"{_name(model)} is conditioned on texts (states of {takes}), and the data has none. Name the text encoder "
            "in data.encode.text, with records that have a text."
        )
    if "text_states" in batch:
        require_texts(model, batch)


def require_texts(model: Any, batch: dict[str, Any]) -> None:
    """Refuses states of texts that are not those that the model takes."""
    states, pooled = (batch[key].shape[-1] if key in batch else None for key in ("text_states", "text_pooled"))
    takes, takes_pooled = model.text_width, getattr(model, "pooled_width", None)
    if takes != states:
        raise RecipeError(
            f"data.encode.text gives states of {states}, and {_name(model)} takes {takes}. Choose the text encoder "
            "that the model was made for."
        )
    if takes_pooled is not None and takes_pooled != pooled:
        raise RecipeError(
            f"{_name(model)} takes a vector of {takes_pooled} for a whole text, and data.encode.text gives "
            f"{'none' if pooled is None else pooled}. Name an encoder that gives it, such as CLIP, before that of the "
            "states: data.encode.text: [{path: CLIP}, {path: T5}]."
        )


def _name(model: Any) -> str:
    return type(model).__name__.removeprefix("FSDP")


@torch.no_grad()
def check_denoiser(
    model: Any, batch: dict[str, Any], timesteps: torch.Tensor, *, compute: torch.dtype, vae: Any = None
) -> list[str]:
    """One image, at timesteps that lie side by side: the prediction has its shape, and no part of the model is given
    two of the timesteps as one. Returns the line that says so, or none where no part takes timesteps. `vae` says what
    shape the images take on, and is not asked for more."""
    images = batch["images"] if vae is None else _latents_of(batch["images"], vae)
    require_data(model, batch, channels=images.shape[1])
    image = images[:1].float().expand(len(timesteps), *images.shape[1:]).contiguous()
    classes = getattr(model, "num_classes", None)
    labels = None if classes is None else torch.zeros(len(timesteps), dtype=torch.int64, device=images.device)
    text = None
    if "text_states" in batch:  # tokens are not encoded here: the model takes what means no text
        text = {name: part[:1].expand(len(timesteps), *part.shape[1:]) for name, part in texts_of(model, batch).items()}
    told: dict[str, bool] = {}
    parts: list[tuple[str, nn.Module]] = list(model.named_modules())
    hooks = [part.register_forward_hook(_watch(name, told, timesteps), with_kwargs=True) for name, part in parts]
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            found = denoised(model, image, timesteps, labels, text)
    finally:
        for hook in hooks:
            hook.remove()
    if found.shape != image.shape:
        raise SetupError(
            f"model.denoise gives {tuple(found.shape)} for images of {tuple(image.shape)}: a prediction has the shape "
            "of the images. Use a model whose output has as many channels and the same size."
        )
    dtype = str(compute).removeprefix("torch.")
    if merged := [name for name, apart in told.items() if not apart]:
        first, last = timesteps[1].item(), timesteps[-1].item()
        raise SetupError(
            f"Computing in {dtype}, {merged[0] or 'the model'} is given some of the timesteps {first:g} to {last:g} as "
            "one, so the model cannot tell them apart: its times are cast to half precision, or lie too close. Keep "
            "them whole numbers or fp32 up to the embedding, raise objective.timestep_scale where the objective has "
            "it, or use precision: fp32."
        )
    return [f"neighbouring timesteps reach the model apart ({dtype})"] if told else []


def _latents_of(images: torch.Tensor, vae: Any) -> torch.Tensor:
    """Zeros in the shape of the latents of images."""
    most = float(images.abs().max())
    if most > 1:
        raise RecipeError(
            f"objective.vae takes images with values from -1 to 1, and those of data.train go up to {most:g}. Leave "
            "data.encode.mean and data.encode.scale out, and give images, not latents."
        )
    try:
        return images.new_zeros(len(images), *vae.latent_shape(images.shape[1:]))
    except ValueError as error:
        raise RecipeError(f"objective.vae: an image of data.train {error}.") from None


def _watch(name: str, told: dict[str, bool], timesteps: torch.Tensor) -> Any:
    """Notes whether a part that is given something that follows from the timestep is given as many values as there are
    timesteps. Only vectors are looked at, one a sample: in images a small change may be lost, and rightly so."""

    def look(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen = [*args, *kwargs.values()] + ([output] if next(part.children(), None) is None else [])
        for value in seen:
            if isinstance(value, torch.Tensor) and value.dim() <= 2 and value.shape[:1] == timesteps.shape:
                differ = (value[1:] != value[:-1]).reshape(len(value) - 1, -1).any(1)
                if bool(differ.any()):
                    told[name] = told.get(name, True) and bool(differ.all())

    return look


def _wide(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, *(1,) * (like.dim() - 1))


__all__ = [
    "Betas",
    "Given",
    "Prediction",
    "Text",
    "alphas_cumprod",
    "check_denoiser",
    "denoised",
    "given",
    "last_times",
    "min_snr_weights",
    "noised",
    "require_denoiser",
    "require_texts",
    "require_vae",
    "sum_of_means",
    "texts_of",
    "velocity",
    "without",
]
