"""Models of Transformers, for any family: from a folder, the hub, an adapter, a checkpoint, or from scratch.

Edits come in one order: embedding size, adapters, frozen parameters. Must not know objectives, ranks or sharding.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, PrivateAttr, model_validator

from fullshard.config.part import did_you_mean
from fullshard.contracts.model import Continuation, Weights
from fullshard.errors import RecipeError
from fullshard.hf import checkpoint_model
from fullshard.hf.adapters.settings import Lora
from fullshard.hf.architecture.config import fit_vocabulary, load_config, take_special_tokens
from fullshard.hf.architecture.sizes import check_architecture, check_size, make_config
from fullshard.hf.hub import is_transformers_folder
from fullshard.hf.hub_model import TokenHubModel
from fullshard.hf.tokenizers.same_vocabulary import check_tokenizer
from fullshard.hf.tokenizers.tokenizer import (
    TOKENIZER_FILES,
    Tokenizer,
    at_most,
    fingerprint_of,
    has_tokenizer,
    load_tokenizer,
    train_tokenizer,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger(__name__)

ATTENTION = ("auto", "sdpa", "eager", "flex_attention", "flash_attention_2", "varlen", "flash_attention_4")


class TransformersModel(TokenHubModel):
    """Weights, tokenizer, adapters and edits of a Transformers model; a family's subclass says what it is for."""

    headless: ClassVar[bool] = False
    """Whether the model is only the backbone."""
    auto: ClassVar[str] = "AutoModelForCausalLM"
    """Transformers' class that builds it."""
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = tuple(
        (stored, scratch) for stored in ("path", "base") for scratch in ("architecture", "size")
    )

    path: str | None = None
    """A folder or hub name with weights to start from; a PEFT adapter is trained further."""
    base: str | None = None
    """The base model of the adapter in `path`, if it is not the one that the adapter names."""
    start: str | None = Field(None, alias="from")
    """Weights to start from instead: a fullshard checkpoint (its folder, a run, best, last; alone it also defines the
    model), or with path or architecture one file with a whole state (.pt, .pth, .bin, .safetensors)."""
    architecture: str | None = None
    """Start from scratch: a Transformers model type (qwen3, llama, gpt2, ...)."""
    size: str | None = None
    """The named size of the architecture; every architecture has tiny."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Config keys to change, on top of the size or the stored config."""
    tokenizer: Tokenizer | None = None
    """A folder, a hub name, or {train: {vocab_size: N}}; null: the one beside `path`."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    lora: Lora | None = None
    """Train adapters instead of the model: true, a rank, or settings."""
    freeze: list[str] = Field(default_factory=list)
    """Patterns of parameter names that are not trained: model.embed_tokens.*"""
    resize_embedding: bool | None = None
    """Rows of embedding and head: null grows them for tokens that were added to the model's own tokenizer, true fits
    them to any tokenizer exactly, false never changes them. New rows start as the mean of the stored ones."""
    attention: str = "auto"
    """auto, sdpa, eager, flex_attention, flash_attention_2, varlen or flash_attention_4."""

    _trained_tokenizer: Path | None = PrivateAttr(None)

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        return is_transformers_folder(folder)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        kinds = (cls.kind(),) if cls.headless else (cls.kind(), "hf")
        return checkpoint_model.completed(values, kinds=kinds) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _consistent(self) -> TransformersModel:
        if (self.path is None) == (self.architecture is None):
            raise ValueError(
                "give exactly one of model.path (weights to start from) and model.architecture (from scratch), or "
                "model.from (a fullshard checkpoint)"
            )
        if self.base is not None and self.path is None:
            raise ValueError("model.base names the base of a PEFT adapter in model.path, but there is no model.path")
        if self.path is not None and self.size is not None:
            raise ValueError("model.size goes with model.architecture; with model.path the weights decide the size")
        if self.architecture is not None and self.size is None and not self.overrides:
            raise ValueError("from scratch, give model.size, or the shape in model.overrides")
        if self.attention not in ATTENTION:
            near = did_you_mean(self.attention, ATTENTION)
            raise ValueError(
                f"model.attention = {self.attention!r} is not known{near}; allowed: {', '.join(ATTENTION)}"
            )
        return self

    def prepare(self, texts: Iterable[str], *, cache: Path, fingerprint: str = "") -> None:
        from fullshard.hf.hub import fetch

        if self.architecture is not None:
            self._config()
        else:
            code = self.trust_remote_code
            fetch(str(self.path), revision=self.revision, code=code, weights=True, where="model.path")
            if self._adapter() is not None:
                name, revision = self._base()
                fetch(name, revision=revision, code=code, weights=True, where="model.base")
        if self.tokenizer and self.tokenizer.path and "://" not in self.tokenizer.path:
            code = self.trust_remote_code
            fetch(self.tokenizer.path, revision=None, code=code, weights=False, where="model.tokenizer")
        if self.tokenizer and self.tokenizer.train:
            training = self.tokenizer.train
            if not fingerprint:
                texts = list(at_most(texts, training.max_characters))
                fingerprint = fingerprint_of(texts)
            self._trained_tokenizer = training.folder(cache, fingerprint)
            train_tokenizer(texts, training, folder=self._trained_tokenizer)

    def processor(self, *, cache: Path, fingerprint: str = "") -> Any:
        """The tokenizer; None if neither the recipe nor the model has one, which is enough for tokenised data."""
        from fullshard.hf.hub import local_folder

        if self.tokenizer and self.tokenizer.train:
            folder = self._trained_tokenizer or self.tokenizer.train.folder(cache, fingerprint)
        elif self.tokenizer and self.tokenizer.path and "://" in self.tokenizer.path:
            folder = checkpoint_model.copied(self.tokenizer.path, cache=cache)
        elif self.tokenizer and self.tokenizer.path:
            folder = local_folder(self.tokenizer.path, revision=None, where="model.tokenizer")
        elif self.path is not None:
            return self.own_processor()
        else:
            return None
        return self.load_processor(folder, where="model.tokenizer")

    def own_processor(self) -> Any:
        """The tokenizer stored with the weights; None without one."""
        if self.start is not None and (kept := checkpoint_model.kept_tokenizer(self.start)) is not None:
            return self.load_processor(kept, where="model.from")
        beside = [self._adapter(), self._folder()] if self.path is not None else []
        found = next((b for b in beside if b and any((b / n).exists() for n in TOKENIZER_FILES)), None)
        return self.load_processor(found, where="model.path") if found and has_tokenizer(found) else None

    def load_processor(self, folder: Path, *, where: str) -> Any:
        return load_tokenizer(folder, trust_remote_code=self.trust_remote_code, where=where)

    def build(self, *, processor: Any) -> nn.Module:
        from fullshard.hf.adapters.edits import add_lora, freeze
        from fullshard.hf.adapters.peft_folder import add_stored
        from fullshard.hf.architecture.attention import kernel_to_build_with
        from fullshard.hf.architecture.empty import empty_model
        from fullshard.hf.export import stored_conversions

        config = self._config()
        if processor is not None:
            self._fit_vocabulary(config, processor)
        attention, code = kernel_to_build_with(self.attention), self.trust_remote_code
        module = empty_model(config, attention=attention, trust_remote_code=code, auto=self._auto(config))
        # Before adapters, which replace layers.
        self._bind(module)
        module._weight_conversions = stored_conversions(module)  # type: ignore[assignment]
        base, revision = self._exported_base()
        if self.lora is not None:
            settings = self.lora
            if self.path is None and self.start is None:
                logger.warning("model.lora on a model from scratch: its random base is frozen and never exported")
            add_lora(
                module,
                r=settings.r,
                alpha=settings.alpha,
                dropout=settings.dropout,
                targets=settings.targets,
                exclude=self._without_adapters(module),
                task="FEATURE_EXTRACTION" if self.headless else "CAUSAL_LM",
                base=base,
                revision=revision,
            )
        elif (adapter := self._adapter()) is not None:
            add_stored(module, adapter, base=str(base), revision=revision)
        freeze(module, self.freeze)
        return module

    def _auto(self, config: Any) -> str:
        return self.auto

    def _without_adapters(self, module: nn.Module) -> list[str]:
        """Modules that get no adapters."""
        # The pooler is unused: an adapter there would never learn.
        return ["pooler"] if self.headless and hasattr(module, "pooler") else []

    def _bind(self, module: nn.Module) -> None:
        """Gives the module the method that objectives call."""
        from fullshard.hf.architecture.head import bind

        logger.info("head: %s", bind(module).reason)

    def choose_kernels(self, module: nn.Module, *, device: str, compute: torch.dtype, packed: bool) -> str:
        from fullshard.hf.architecture.attention import choose_attention

        return choose_attention(module, self.attention, device=device, compute=compute, packed=packed)

    def load_with(self, folder: str, *, adapter: bool) -> str | None:
        return None if adapter and self.stored_in() is None else super().load_with(folder, adapter=adapter)

    def stop_tokens(self, module: nn.Module) -> set[int]:
        from fullshard.hf.generate import stop_tokens

        return stop_tokens(module, self._source())

    def continued(self, module: nn.Module, rows: Any, way: Continuation, **placed: Any) -> list[list[int]] | None:
        from fullshard.hf.generate import continue_rows

        return continue_rows(module, rows, way, source=self._source(), **placed)

    def longest(self, module: nn.Module) -> int | None:
        model: Any = module
        positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return positions if isinstance(positions, int) and positions > 0 else None

    def weights(self, module: nn.Module) -> Weights | None:
        from fullshard.hf.adapters.peft_folder import adapter_weights
        from fullshard.hf.weights.start_weights import start_weights
        from fullshard.hf.weights.stored_weights import FirstOf, SafetensorsWeights

        model: Any = module
        rows = model.config.get_text_config(decoder=True).vocab_size
        resized = rows != self._config().get_text_config(decoder=True).vocab_size

        def folder() -> Weights:
            return SafetensorsWeights(self._folder(), module, resized=resized, headless=self.headless)

        adapter = self._adapter()
        if self.start is not None:
            return start_weights(
                self.start,
                module,
                base=folder if self.path is not None else None,
                adapter=functools.partial(adapter_weights, adapter, module) if adapter is not None else None,
                # From scratch there is no stored vocabulary size to grow from.
                resized=resized if self.path is not None else self.resize_embedding is True,
                alpha=self.lora.alpha if self.lora is not None else None,
            )
        if self.path is None:
            return None
        return folder() if adapter is None else FirstOf(adapter_weights(adapter, module), folder())

    def stored_in(self) -> Path | None:
        """The folder of the base model's weights; None from scratch or with `model.from`."""
        from fullshard.hf.weights.start_weights import frozen_dtype

        if self.path is None or (self.start is not None and frozen_dtype(self.start) is not None):
            return None
        return self._folder()

    def initialise(self, unit: nn.Module, *, root: nn.Module) -> None:
        from fullshard.hf.weights.initialise import initialise_subtree

        initialise_subtree(unit, root=root)

    def storage_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        """fp32 if trained; frozen parameters stay in half precision if they are stored so."""
        import torch

        from fullshard.hf.weights.safetensors_folder import stored_dtype
        from fullshard.hf.weights.start_weights import frozen_dtype

        if parameter.requires_grad:
            return torch.float32
        stored = frozen_dtype(self.start) if self.start is not None else None
        if stored is None and self.path is not None:
            stored = stored_dtype(self._folder())
        return stored if stored in (torch.bfloat16, torch.float16) else torch.float32

    def flops_per_token(self, module: nn.Module, *, length: int) -> float:
        from fullshard.hf.architecture.flops import flops_per_token

        return flops_per_token(module, length=length)

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
        """Adapters in PEFT's layout, everything else in Transformers' layout and the stored dtype."""
        from fullshard.hf.adapters.edits import has_adapters
        from fullshard.hf.export import Form, export_adapter, export_model
        from fullshard.hf.weights.safetensors_folder import stored_dtype

        if has_adapters(module) and not merged:
            export_adapter(module, tensors, folder, processor=processor, dtype=dtype)
            return
        source = self._source()
        form = Form(dtype or (stored_dtype(source) if source else None), shard_bytes, merged)
        export_model(module, tensors, folder, form, source=source, processor=processor)

    def _adapter(self) -> Path | None:
        """The PEFT adapter in `path`; None if `path` is a model."""
        from fullshard.hf.adapters.peft_folder import is_adapter_folder
        from fullshard.hf.hub import local_folder

        if self.path is None:
            return None
        folder = local_folder(self.path, revision=self.revision, where="model.path")
        if not is_adapter_folder(folder, base_named=self.base is not None):
            if self.base is not None:
                raise RecipeError(
                    f"model.base = {self.base!r} names the base of a PEFT adapter, but model.path = {self.path!r} is "
                    "not an adapter (it has no adapter_config.json). Leave model.base out."
                )
            return None
        if self.lora is not None:
            raise RecipeError(
                f"model.lora: model.path = {self.path!r} is a PEFT adapter, which is trained further with its own "
                "settings (r, alpha, targets). Leave model.lora out; for new adapters name the base model in "
                "model.path."
            )
        return folder

    def _base(self) -> tuple[str, str | None]:
        """The base model of the adapter in `path`, and its revision on the hub."""
        from fullshard.hf.adapters.peft_folder import named_base

        return (self.base, None) if self.base is not None else named_base(Path(self._adapter() or ""))

    def _exported_base(self) -> tuple[str | None, str | None]:
        """The base that exported adapters name, valid in any working directory, and its revision on the hub.

        May be a checkpoint or file from `model.from`, which only fullshard reads."""
        from fullshard.hf.hub import lasting

        if self.stored_in() is None:
            local = self.start is not None and "://" not in self.start
            return (str(Path(str(self.start)).expanduser().resolve()) if local else self.start), None
        name, revision = self._base() if self._adapter() is not None else (str(self.path), self.revision)
        named = lasting(name, folder=self._folder())
        return named, revision if named == name else None

    def _folder(self) -> Path:
        """The folder with config and weights: `path`, or the base of the adapter there."""
        from fullshard.hf.hub import local_folder

        if self._adapter() is not None:
            name, revision = self._base()
            return local_folder(name, revision=revision, where="model.base")
        folder = local_folder(str(self.path), revision=self.revision, where="model.path")
        checkpoint_model.refuse_checkpoint(folder, str(self.path))
        return folder

    def _source(self) -> Path | None:
        return self._folder() if self.path is not None else None

    def _config(self) -> Any:
        """A fresh config, before it is fitted to a tokenizer."""
        if self.architecture is not None:
            architecture = check_architecture(self.architecture)
            size = check_size(architecture, self.size) if self.size is not None else None
            return make_config(architecture, size, self.overrides)
        return load_config(self._folder(), trust_remote_code=self.trust_remote_code, overrides=self.overrides)

    def stored_rows(self) -> int | None:
        """The vocabulary size of the stored config; None without one."""
        return int(self._config().get_text_config(decoder=True).vocab_size) if self.path is not None else None

    def _fit_vocabulary(self, config: Any, processor: Any) -> None:
        rows = self.stored_rows()
        if self.tokenizer is not None and (rows is not None or self.start is not None):
            check_tokenizer(processor, self.own_processor(), rows=rows, agreed=self.resize_embedding is True)
        # A named size keeps its vocabulary; tiny has no fixed one.
        exact = self.resize_embedding is True or (self.size == "tiny" and "vocab_size" not in self.overrides)
        new_rows = fit_vocabulary(config, processor, resize=self.resize_embedding, exact=exact, stored=rows is not None)
        if new_rows and (self.lora is not None or self._adapter() is not None):
            logger.warning("the %d new embedding rows stay as they are: LoRA trains adapters only", new_rows)
        if self.architecture is not None:
            take_special_tokens(config, processor)
