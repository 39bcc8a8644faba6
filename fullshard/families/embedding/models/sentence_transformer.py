"""Embedding models: a folder of sentence-transformers, or any pooled encoder or decoder of Transformers, also with
images.

`TransformersModel` has everything about the backbone's weights, adapters and edits. Dense layers after pooling are
trained with the backbone; with adapters they are frozen, like the backbone. Must not know objectives, ranks or
sharding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from fullshard.contracts.model import Weights
from fullshard.errors import RecipeError
from fullshard.families.embedding.embedder.sentence_folder import (
    Sentence,
    is_after_pooling,
    lower_texts,
    read_sentence,
    write_sentence,
)
from fullshard.hf.transformers_model import TransformersModel

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger(__name__)

UNBOUNDED = 10**9
"""A tokenizer's model_max_length above this means no limit."""


class SentenceTransformer(TransformersModel):
    """A model that turns a text into one vector."""

    forward_methods: ClassVar[tuple[str, ...]] = ("embed",)
    usual: ClassVar[dict[str, Any] | None] = {
        "objective": {"kind": "contrastive"},
        "evaluate": {"parts": ["loss", "retrieval"]},
    }
    headless: ClassVar[bool] = True
    auto: ClassVar[str] = "AutoModel"
    never_trained: ClassVar[tuple[str, ...]] = ("pooler.*",)
    loader: ClassVar[str | None] = "sentence_transformers.SentenceTransformer"
    adapter_loader: ClassVar[str | None] = None

    pooling: Literal["mean", "cls", "last"] | None = None
    """How tokens become one vector: their mean, the first one, the last one. null: as stored; for a plain model the
    mean of an encoder, the last token of a decoder."""
    normalize: bool | None = None
    """Vectors of length 1; null: as stored, and yes for a plain model."""
    max_pixels: int | None = Field(None, ge=1)
    """Images with more pixels are made smaller; null: as stored. For models that take images."""

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        return (folder / "modules.json").is_file()

    def processor(self, *, cache: Path, fingerprint: str = "") -> Any:
        """The tokenizer with the stored prompts; one from another run may bring its own."""
        processor = super().processor(cache=cache, fingerprint=fingerprint)
        if processor is not None:
            stored = self._sentence()
            own = _prompts_of(processor) if self.tokenizer else {}
            processor.prompts = own or dict(stored.prompts)
            if stored.lower_case:
                lower_texts(processor)
        return processor

    def own_processor(self) -> Any:
        processor = super().own_processor()
        if processor is not None and self._sentence().lower_case:
            lower_texts(processor)
        return processor

    def load_processor(self, folder: Path, *, where: str) -> Any:
        """With an image processor if the model takes images and the folder has one."""
        from fullshard.families.embedding.embedder.embed import images_of
        from fullshard.multimodal.pair_processor import has_vision, load_vision

        tokenizer = super().load_processor(folder, where=where)
        if images_of(self._config()) is None or not has_vision(folder):
            if self.max_pixels is not None:
                raise RecipeError(f"model.max_pixels: {folder} has no image processor of a vision-language model.")
            return tokenizer
        vision = load_vision(tokenizer, folder, trust_remote_code=self.trust_remote_code, where=where)
        vision.template = dict(self._sentence().template)
        if self.max_pixels is not None:
            vision.limit(self.max_pixels)
        return vision

    def choose_kernels(self, module: nn.Module, *, device: str, compute: torch.dtype, packed: bool) -> str:
        from fullshard.families.embedding.embedder.embed import images_of

        # The kernel for packed rows would also replace that of the vision tower.
        model: Any = module
        plain = images_of(model.config) is None
        return super().choose_kernels(module, device=device, compute=compute, packed=packed and plain)

    def longest(self, module: nn.Module) -> int | None:
        from fullshard.families.embedding.embedder.embed import position_offset

        found = super().longest(module)
        return None if found is None else found - position_offset(module)

    def weights(self, module: nn.Module) -> Weights | None:
        """With the Dense layers' own files, unless `model.from` has them."""
        from fullshard.families.embedding.embedder.dense import dense_weights, layers_of, parameter_names
        from fullshard.hf.weights.stored_weights import FirstOf

        found, layers = super().weights(module), layers_of(module)
        if found is None or parameter_names(layers) <= found.names():
            return found
        return FirstOf(found, dense_weights(layers))

    def storage_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        """fp32 for Dense layers: the backbone's stored dtype does not apply to them."""
        import torch

        return torch.float32 if is_after_pooling(name) else super().storage_dtype(name, parameter)

    def exports(self, module: nn.Module, name: str) -> bool:
        return is_after_pooling(name) or super().exports(module, name)

    def export(
        self,
        module: nn.Module,
        tensors: Iterator[tuple[str, torch.Tensor]],
        folder: Path,
        *,
        processor: Any,
        dtype: torch.dtype | None = None,
        shard_bytes: int | None = None,
        merged: bool = False,
    ) -> None:
        """The backbone or its adapters, and what `SentenceTransformer(folder)` reads beside them."""
        from fullshard.families.embedding.embedder.dense import backbone_of, layers_of, set_aside, write_layers
        from fullshard.families.embedding.embedder.embed import width_of
        from fullshard.hf.adapters.edits import has_adapters

        form: dict[str, Any] = {"dtype": dtype, "shard_bytes": shard_bytes, "merged": merged}
        dense: dict[str, torch.Tensor] = {}
        super().export(backbone_of(module), set_aside(tensors, dense), folder, processor=processor, **form)
        model: Any = module
        layers = layers_of(module)
        folders = write_sentence(
            folder,
            width=width_of(module),
            longest=self._cut(module, processor),
            pooling=model.embed_rule.pooling,
            dense=layers,
            normalize=model.embed_rule.normalize,
            prompts=_prompts_of(processor),
            template=getattr(processor, "template", {}),
            images=hasattr(processor, "image_processor"),
        )
        if has_adapters(module) and not merged:
            dense = self._frozen_dense(module, given=dense)
        write_layers(folders, layers, dense, dtype)

    def _frozen_dense(self, module: nn.Module, *, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Dense layers beside adapters: `fullshard export` gives only adapters, so frozen layers are read again."""
        from fullshard.families.embedding.embedder.dense import layers_of, parameter_names

        absent = parameter_names(layers_of(module)) - given.keys()
        stored = self.weights(module) if absent else None
        if stored is None:
            return given
        return given | {name: stored.read(name, 0, module.get_parameter(name).shape[0]) for name in absent}

    def _cut(self, module: nn.Module, processor: Any) -> int | None:
        """The maximum number of tokens of a text: as in the run; without a run, as stored by either library."""
        tokenizer = getattr(processor, "tokenizer", processor)
        if trained := getattr(tokenizer, "init_kwargs", {}).get("trained_length"):
            return int(trained)
        named = getattr(tokenizer, "model_max_length", None)
        known = [number for number in (self.longest(module), named) if number and number < UNBOUNDED]
        return self._sentence().longest or min(known, default=None)

    def _bind(self, module: nn.Module) -> None:
        from fullshard.families.embedding.embedder.embed import bind, is_causal

        model: Any = module
        if model.config.is_encoder_decoder:
            raise RecipeError(
                f"model.kind = sentence_transformer: {type(module).__name__} has an encoder and a decoder. Use "
                "an encoder-only or a decoder-only model."
            )
        stored = self._sentence()
        usual = stored.pooling or ("last" if is_causal(module) else "mean")
        normalize = stored.normalize if stored.pooling else True
        bind(
            module,
            pooling=self.pooling or usual,
            normalize=normalize if self.normalize is None else self.normalize,
            dense=stored.dense,
        )
        if stored.dense and (self.lora is not None or self._adapter() is not None):
            logger.warning("the Dense modules are frozen: LoRA trains adapters only")

    def _sentence(self) -> Sentence:
        if self.path is None:
            return Sentence()
        places = [folder for folder in (self._adapter(), super()._folder()) if folder is not None]
        return next((found for folder in places if (found := read_sentence(folder))), Sentence())

    def _exported_base(self) -> tuple[str | None, str | None]:
        """The backbone's own folder if it is a subfolder: peft only looks at the top."""
        inside = self.stored_in() is not None and self._folder() != super()._folder()
        return (str(self._folder()), None) if inside else super()._exported_base()

    def _folder(self) -> Path:
        folder = super()._folder()
        stored = read_sentence(folder)
        return folder / stored.backbone if stored else folder


def _prompts_of(processor: Any) -> dict[str, str]:
    """The prompts of a processor; a freshly loaded one has them in its settings."""
    tokenizer = getattr(processor, "tokenizer", processor)
    found = getattr(processor, "prompts", None) or getattr(tokenizer, "init_kwargs", {}).get("prompts")
    return dict(found or {})


__all__ = ["SentenceTransformer"]
