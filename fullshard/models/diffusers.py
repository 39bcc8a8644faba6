"""The diffusers family: denoisers by class and size, or from a folder or the hub; with labels, texts or neither.

Edits come in one order: adapters, frozen parameters. Must not know objectives, noise, ranks or sharding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from fullshard.diffusion.shapes import class_of, completed, named_size
from fullshard.models.base import Family, Weights
from fullshard.models.hf import Lora

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger(__name__)

REHEARSED = 2
"""Images in a forward pass without values."""


class Diffusers(Family):
    """A denoiser of diffusers."""

    loader: ClassVar[str] = "diffusers.AutoModel.from_pretrained"
    forward_methods: ClassVar[tuple[str, ...]] = ("denoise",)
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("path", "architecture"), ("path", "size"))

    path: str | None = None
    """A folder or hub name to start from: of a denoiser, or of a pipeline that has one."""
    architecture: str | None = None
    """Start from scratch: dit, unet, sd3, flux, pixart, unet_text, or the class of diffusers."""
    size: str | None = None
    """The named size: tiny of every architecture; of dit also S, B, L or XL with a patch of 2, 4 or 8 (XL/2)."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Settings of the class that differ: sample_size, in_channels, num_layers, ..."""
    classes: int | None = Field(None, ge=1)
    """Labels from 0 to one less; one more row stands for none. null: as stored, and without labels from scratch."""
    guidance: float = Field(3.5, ge=0)
    """What a model that takes its guidance as an input (Flux with guidance_embeds) is told, always."""
    lora: Lora | None = None
    """Train adapters instead of the model: true, a rank, or settings."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    freeze: list[str] = Field(default_factory=list)
    """Patterns over parameter names that are not trained."""

    @model_validator(mode="after")
    def _one_of(self) -> Diffusers:
        if (self.path is None) == (self.architecture is None):
            raise ValueError(
                "give exactly one of model.path (weights to start from) and model.architecture (from scratch)"
            )
        if self.architecture is not None and self.size is None and not self.overrides:
            raise ValueError("from scratch, give model.size, or the shape in model.overrides")
        return self

    def prepare(self, texts: Iterable[str], *, cache: Path, fingerprint: str = "") -> None:
        from fullshard.hf.hub import fetch

        if self.path is not None:
            fetch(self.path, revision=self.revision, code=False, weights=True, where="model.path")

    def build(self, *, processor: Any) -> nn.Module:
        from accelerate import init_empty_weights

        from fullshard.diffusion.denoise import bind
        from fullshard.hf.edits import freeze

        name, settings = self._settings()
        with init_empty_weights(include_buffers=False):
            module: nn.Module = class_of(name).from_config(settings)
        bind(module, classes=self._classes(name, settings), guidance=self.guidance)
        if self.lora is not None:
            self._adapt(module, self.lora)
        freeze(module, self.freeze)
        return module

    def _adapt(self, module: nn.Module, settings: Lora) -> None:
        from fullshard.diffusion.adapter import every_linear
        from fullshard.hf.edits import add_lora

        if self.path is None:
            logger.warning("model.lora on a model from scratch: its random base is frozen and never exported")
        add_lora(
            module,
            r=settings.r,
            alpha=settings.alpha,
            dropout=settings.dropout,
            targets=every_linear(module) if settings.targets == "all-linear" else settings.targets,
            task=None,
            base=self.path,
        )

    def weights(self, module: nn.Module) -> Weights | None:
        from fullshard.diffusion.files import FolderWeights

        folder = self.stored_in()
        return FolderWeights(folder, module) if folder is not None else None

    def stored_in(self) -> Path | None:
        from fullshard.diffusion.files import model_folder
        from fullshard.hf.hub import local_folder

        if self.path is None:
            return None
        return model_folder(local_folder(self.path, revision=self.revision, where="model.path"))

    def initialise(self, unit: nn.Module, *, root: nn.Module) -> None:
        from fullshard.diffusion.init import initialise

        initialise(unit)

    def storage_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        """fp32 for what is trained; frozen parameters stay in the half precision they are stored in, if they are."""
        import torch

        stored = torch.float32 if parameter.requires_grad else self._stored_dtype()
        return stored if stored in (torch.bfloat16, torch.float16) else torch.float32

    def load_with(self, folder: str, *, adapter: bool) -> str:
        if not adapter:
            return super().load_with(folder, adapter=False)
        if hasattr(class_of(self._settings()[0]), "load_lora_adapter"):
            return f"PIPELINE.load_lora_weights({folder!r})"
        return f"peft.PeftModel.from_pretrained(MODEL, {folder!r})"

    def choose_kernels(self, module: nn.Module, *, device: str, compute: torch.dtype, packed: bool) -> str:
        import torch

        from fullshard.diffusion.fused import fuse

        fits = device == "cuda" and compute in (torch.bfloat16, torch.float16)
        return fuse(module) if fits else super().choose_kernels(module, device=device, compute=compute, packed=packed)

    def rehearse(self, module: nn.Module) -> None:
        import torch

        model: Any = module
        size = getattr(model.config, "sample_size", None) or 32
        sides = (size, size) if isinstance(size, int) else tuple(size)
        noisy = torch.empty(REHEARSED, model.image_channels, *sides, device="meta")
        times = torch.empty(REHEARSED, device="meta")
        model.denoise(noisy, times)

    def flops_per_token(self, module: nn.Module, *, length: int) -> float:
        """Of an image: the matrix products of a forward pass, as torch counts them, and twice as many backward; once
        where weights are frozen, which need no gradient."""
        import copy

        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            self.rehearse(copy.deepcopy(module).to("meta"))
        passes = 2 if self.lora is not None else 3
        return float(passes * counter.get_total_flops() / REHEARSED)

    def exports(self, module: nn.Module, name: str) -> bool:
        from fullshard.hf.edits import has_adapters, is_adapter
        from fullshard.ops.scalars import is_scalar

        return is_adapter(name) or not (has_adapters(module) or is_scalar(name))

    def export(
        self,
        module: nn.Module,
        tensors: Iterator[tuple[str, torch.Tensor]],
        folder: Path,
        *,
        processor: Any,
        dtype: torch.dtype | None = None,
        merged: bool = False,
    ) -> None:
        """Adapters alone, or configuration and weights in diffusers' own layout, in the dtype they were stored in."""
        from fullshard.diffusion.adapter import write_adapter
        from fullshard.diffusion.files import write_model
        from fullshard.hf.edits import has_adapters

        folder.mkdir(parents=True, exist_ok=True)
        if has_adapters(module) and not merged:
            write_adapter(module, tensors, folder, dtype=dtype)
            return
        write_model(module, tensors, folder, dtype=dtype or self._stored_dtype(), merged=merged)

    def _stored_dtype(self) -> torch.dtype:
        import torch

        from fullshard.diffusion.files import stored_dtype

        folder = self.stored_in()
        return torch.float32 if folder is None else stored_dtype(folder)

    def _settings(self) -> tuple[str, dict[str, Any]]:
        """The name of the class, and all of its settings."""
        from fullshard.diffusion.files import read_config

        folder = self.stored_in()
        if folder is not None:
            name, settings = read_config(folder)
        else:
            assert self.architecture is not None
            name = class_of(self.architecture).__name__
            settings = named_size(name, self.size) if self.size is not None else {}
        settings, stored = {**settings, **self.overrides}, folder is not None
        return name, completed(name, settings, classes=self.classes, stored=stored, where="model.overrides")

    def _classes(self, name: str, settings: dict[str, Any]) -> int | None:
        """How many labels there are; a stored model knows, and the last row of a table is the one for none."""
        if self.classes is not None or self.path is None:
            return self.classes
        if name == "DiTTransformer2DModel":
            return int(settings["num_embeds_ada_norm"])
        rows = settings.get("num_class_embeds")
        return int(rows) - 1 if rows else None


__all__ = ["Diffusers"]
