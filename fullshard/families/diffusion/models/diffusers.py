"""Denoisers of diffusers: from scratch by class and size, or from a folder or the hub.

Edits come in one order: adapters, frozen parameters. Must not know objectives, noise, ranks or sharding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from fullshard.contracts.model import Weights
from fullshard.errors import RecipeError
from fullshard.families.diffusion.denoiser.architectures import FLUX, class_of, completed, implied, named_size
from fullshard.hf.adapters.settings import Lora
from fullshard.hf.hub import read_config
from fullshard.hf.hub_model import HubModel

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger(__name__)

GUIDANCE = 3.5
"""The default of diffusers' pipelines for guidance-distilled models."""
REHEARSED = 2
"""Images in a forward pass on meta."""


class Diffusers(HubModel):
    """A denoiser of diffusers."""

    loader: ClassVar[str | None] = "diffusers.AutoModel.from_pretrained"
    forward_methods: ClassVar[tuple[str, ...]] = ("denoise",)
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("path", "architecture"), ("path", "size"))

    path: str | None = None
    """A folder or hub name to start from: of a denoiser, or of a pipeline that has one."""
    architecture: str | None = None
    """Start from scratch: dit, unet, sd3, flux, pixart, unet_text, or the class of diffusers."""
    size: str | None = None
    """The named size: tiny of every architecture; of dit also S, B, L or XL with a patch of 2, 4 or 8 (XL/2)."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Settings of the class: sample_size, in_channels, num_layers, ... sample_size is the size of the data (of latents,
    with a VAE), at which the model is trained, sampled and exported."""
    classes: int | None = Field(None, ge=1)
    """The number of labels; one more row is for "no class". null: as stored; from scratch, no labels."""
    guidance: float = Field(GUIDANCE, ge=0)
    """The guidance input of a guidance-distilled model (Flux with guidance_embeds)."""
    lora: Lora | None = None
    """Train adapters instead of the model: true, a rank, or settings."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    freeze: list[str] = Field(default_factory=list)
    """Patterns of parameter names that are not trained."""

    @model_validator(mode="after")
    def _one_of(self) -> Diffusers:
        if (self.path is None) == (self.architecture is None):
            raise ValueError(
                "give exactly one of model.path (weights to start from) and model.architecture (from scratch)"
            )
        if self.architecture is not None and self.size is None and not self.overrides:
            raise ValueError("from scratch, give model.size, or the shape in model.overrides")
        return self

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        if (folder / "modules.json").is_file():
            return False
        return (folder / "model_index.json").is_file() or "_class_name" in (read_config(folder) or {})

    def prepare(self, texts: Iterable[str], *, cache: Path, fingerprint: str = "") -> None:
        from fullshard.hf.hub import fetch

        if self.path is not None:
            fetch(self.path, revision=self.revision, code=False, weights=True, where="model.path")

    def build(self, *, processor: Any) -> nn.Module:
        from accelerate import init_empty_weights

        from fullshard.families.diffusion.denoiser.bind import bind
        from fullshard.hf.adapters.edits import freeze

        name, settings = self._settings()
        with init_empty_weights(include_buffers=False):
            module: nn.Module = class_of(name).from_config(settings)
        takes_guidance = name == FLUX and settings.get("guidance_embeds")
        if not takes_guidance and self.guidance != GUIDANCE:
            raise RecipeError(
                f"model.guidance = {self.guidance:g} is for models that take their guidance as an input (Flux with "
                f"guidance_embeds), but {name} does not. Leave it out; images are guided by evaluate.parts and "
                "fullshard sample --guidance."
            )
        classes = self._classes(name, settings)
        bind(module, classes=classes, guidance=self.guidance, fresh=self.path is None)
        if self.lora is not None:
            self._adapt(module, self.lora)
        freeze(module, self.freeze)
        return module

    def _adapt(self, module: nn.Module, settings: Lora) -> None:
        from fullshard.families.diffusion.denoiser.lora_export import every_linear
        from fullshard.hf.adapters.edits import add_lora

        base = self._exported_base()
        if base is None:
            logger.warning("model.lora on a model from scratch: its random base is frozen and never exported")
        add_lora(
            module,
            r=settings.r,
            alpha=settings.alpha,
            dropout=settings.dropout,
            targets=every_linear(module) if settings.targets == "all-linear" else settings.targets,
            task=None,
            base=base,
            revision=self.revision if base == self.path else None,
        )

    def weights(self, module: nn.Module) -> Weights | None:
        from fullshard.families.diffusion.denoiser.model_folder import folder_weights

        folder = self.stored_in()
        return folder_weights(folder, module) if folder is not None else None

    def stored_in(self) -> Path | None:
        from fullshard.families.diffusion.denoiser.model_folder import model_folder

        return None if self.path is None else model_folder(self._named_folder())

    def initialise(self, unit: nn.Module, *, root: nn.Module) -> None:
        from fullshard.families.diffusion.denoiser.initial_weights import initialise

        initialise(unit)

    def storage_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        """fp32 if trained; frozen parameters stay in half precision if they are stored so."""
        import torch

        stored = torch.float32 if parameter.requires_grad else self._stored_dtype()
        return stored if stored in (torch.bfloat16, torch.float16) else torch.float32

    def load_with(self, folder: str, *, adapter: bool) -> str | None:
        if not adapter:
            return super().load_with(folder, adapter=False)
        stored, base = self.stored_in(), self._exported_base()
        if stored is None or base is None:
            return None
        from fullshard.families.diffusion.denoiser.lora_export import WEIGHTS, prefix_of

        name, inside = self._settings()[0], self._inside_pipeline()
        place = f"{base!r}{f', revision={self.revision!r}' if self.revision and base == self.path else ''}"
        model = f"{self.loader}({place}{f', subfolder={stored.name!r}' if inside else ''})"
        if not hasattr(class_of(name), "load_lora_adapter"):
            return f"peft.PeftModel.from_pretrained({model}, {folder!r})"
        if inside:
            pipeline = f"diffusers.DiffusionPipeline.from_pretrained({place})"
            return f"pipeline = {pipeline}; pipeline.load_lora_weights({folder!r})"
        options = f"weight_name={WEIGHTS!r}, prefix={prefix_of(name)!r}"
        return f"model = {model}; model.load_lora_adapter({folder!r}, {options})"

    def _exported_base(self) -> str | None:
        """The base that exported adapters name, valid in any working directory; None from scratch."""
        from fullshard.hf.hub import lasting

        return None if self.path is None else lasting(self.path, folder=self._named_folder())

    def _inside_pipeline(self) -> bool:
        """Whether `path` names a pipeline."""
        return self.path is not None and self.stored_in() != self._named_folder()

    def _named_folder(self) -> Path:
        from fullshard.hf.hub import local_folder

        return local_folder(str(self.path), revision=self.revision, where="model.path")

    def choose_kernels(self, module: nn.Module, *, device: str, compute: torch.dtype, packed: bool) -> str:
        import torch

        from fullshard.families.diffusion.kernels.fused import fuse

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
        """FLOPs per image: matrix products of a forward pass, as torch counts them, and twice that backward; once if
        weights are frozen and need no gradient."""
        import copy

        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            self.rehearse(copy.deepcopy(module).to("meta"))
        passes = 2 if self.lora is not None else 3
        return float(passes * counter.get_total_flops() / REHEARSED)

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
        """Only adapters, or config and weights in diffusers' layout, in `dtype` or as they were stored."""
        from fullshard.families.diffusion.denoiser.lora_export import write_adapter
        from fullshard.families.diffusion.denoiser.model_folder import write_model
        from fullshard.hf.adapters.edits import has_adapters

        folder.mkdir(parents=True, exist_ok=True)
        if has_adapters(module) and not merged:
            write_adapter(module, tensors, folder, dtype=dtype)
            return
        write_model(module, tensors, folder, dtype=dtype or self._stored_dtype(), merged=merged)

    def _stored_dtype(self) -> torch.dtype:
        import torch

        from fullshard.hf.weights.safetensors_folder import stored_dtype

        folder = self.stored_in()
        return torch.float32 if folder is None else stored_dtype(folder)

    def _settings(self) -> tuple[str, dict[str, Any]]:
        """The class name, and all settings."""
        from fullshard.families.diffusion.denoiser.model_folder import read_config

        folder = self.stored_in()
        if folder is not None:
            name, settings = read_config(folder)
        else:
            assert self.architecture is not None
            name = class_of(self.architecture).__name__
            settings = named_size(name, self.size) if self.size is not None else {}
        if folder is not None:
            settings |= implied(name, settings)
        settings, stored = {**settings, **self.overrides}, folder is not None
        return name, completed(name, settings, classes=self.classes, stored=stored, where="model.overrides")

    def _classes(self, name: str, settings: dict[str, Any]) -> int | None:
        """The number of labels; in a stored table the last row is for "no class"."""
        if self.classes is not None or self.path is None:
            return self.classes
        if name == "DiTTransformer2DModel":
            return int(settings["num_embeds_ada_norm"])
        rows = settings.get("num_class_embeds")
        return int(rows) - 1 if rows else None


__all__ = ["Diffusers"]
