"""A frozen text encoder of Transformers beside a denoiser, for data.encode.text with live. Never trained.

Must not know objectives, data, ranks or sharding.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fullshard.contracts.model import Family, Weights
from fullshard.families.diffusion.text.encoder_stack import Join, Texts

if TYPE_CHECKING:
    import torch
    from torch import nn


class TextEncoder(Family):
    """A text encoder."""

    loader: ClassVar[str | None] = "transformers.AutoModel.from_pretrained"
    forward_methods: ClassVar[tuple[str, ...]] = ("encode_texts",)

    encoder: Texts
    """An entry of data.encode.text."""
    early: bool = False
    """Whether states come from the second-to-last layer."""
    join: Join = "flux"
    """How its states are combined with those of other encoders: data.encode.join."""

    def compute_precision(self) -> str:
        return self.encoder.precision

    def prepare(self, texts: Iterable[str], *, cache: Path, fingerprint: str = "") -> None:
        self.stored_in()

    def stored_in(self) -> Path:
        return self.encoder.folder()

    def build(self, *, processor: Any) -> nn.Module:
        from fullshard.families.diffusion.text.encoder_model import empty

        found: nn.Module = self.encoder.bound(empty(self.stored_in()), early=self.early, join=self.join)
        return found

    def weights(self, module: nn.Module) -> Weights | None:
        from fullshard.families.diffusion.text.encoder_model import TextWeights

        return TextWeights(self.stored_in(), module)

    def storage_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        """As stored, if that is half precision; else fp32."""
        import torch

        from fullshard.hf.weights.safetensors_folder import stored_dtype

        stored = stored_dtype(self.stored_in())
        return stored if stored in (torch.bfloat16, torch.float16) else torch.float32

    def rehearse(self, module: nn.Module) -> None:
        import torch

        model: Any = module
        model.encode_texts(torch.zeros(1, self.encoder.max_tokens, dtype=torch.int64, device="meta"))


__all__ = ["TextEncoder"]
