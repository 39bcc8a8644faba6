"""The diffusers family: denoisers by class and size, or from a folder or the hub; class-conditional or without labels.

Must not know objectives, noise, ranks or sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from fullshard.diffusion.shapes import class_of, completed, named_size
from fullshard.models.base import Family, Weights

if TYPE_CHECKING:
    import torch
    from torch import nn


class Diffusers(Family):
    """A denoiser of diffusers."""

    loader: ClassVar[str] = "diffusers.AutoModel.from_pretrained"
    forward_methods: ClassVar[tuple[str, ...]] = ("denoise",)
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("path", "architecture"), ("path", "size"))

    path: str | None = None
    """A folder or hub name to start from: of a denoiser, or of a pipeline that has one."""
    architecture: str | None = None
    """Start from scratch: dit, unet, or a class of diffusers."""
    size: str | None = None
    """The named size of the architecture: S, B, L or XL with a patch of 2, 4 or 8 (XL/2); tiny."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Settings of the class that differ: sample_size, in_channels, num_layers, ..."""
    classes: int | None = Field(None, ge=1)
    """Labels from 0 to one less; one more row stands for none. null: as stored, and without labels from scratch."""
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
        bind(module, classes=self._classes(name, settings))
        freeze(module, self.freeze)
        return module

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

    def rehearse(self, module: nn.Module) -> None:
        import torch

        model: Any = module
        size, channels = model.config.sample_size or 32, model.config.in_channels
        sides = (size, size) if isinstance(size, int) else tuple(size)
        noisy, times = torch.empty(2, channels, *sides, device="meta"), torch.empty(2, device="meta")
        model.denoise(noisy, times, None)

    def flops_per_token(self, module: nn.Module, *, length: int) -> float:
        return 6.0 * sum(p.numel() for p in module.parameters())

    def export(
        self,
        module: nn.Module,
        tensors: Iterator[tuple[str, torch.Tensor]],
        folder: Path,
        *,
        processor: Any,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Configuration and weights in diffusers' own layout."""
        from fullshard.diffusion.files import write_model

        folder.mkdir(parents=True, exist_ok=True)
        write_model(module, tensors, folder, dtype=dtype)

    def _settings(self) -> tuple[str, dict[str, Any]]:
        """The name of the class, and all of its settings."""
        from fullshard.diffusion.files import read_config

        folder = self.stored_in()
        if folder is not None:
            stored = read_config(folder)
            name = str(stored.pop("_class_name"))
            stored = {key: value for key, value in stored.items() if not key.startswith("_")}
            return name, completed(name, {**stored, **self.overrides}, classes=self.classes, where="model.overrides")
        assert self.architecture is not None
        name = class_of(self.architecture).__name__
        sized = named_size(name, self.size) if self.size is not None else {}
        return name, completed(name, {**sized, **self.overrides}, classes=self.classes, where="model.overrides")

    def _classes(self, name: str, settings: dict[str, Any]) -> int | None:
        """How many labels there are; a stored model knows, and the last row of a table is the one for none."""
        if self.classes is not None or self.path is None:
            return self.classes
        if name == "DiTTransformer2DModel":
            return int(settings["num_embeds_ada_norm"])
        rows = settings.get("num_class_embeds")
        return int(rows) - 1 if rows else None


__all__ = ["Diffusers"]
