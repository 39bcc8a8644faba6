"""The Transformers family: any causal language model, from a folder, from the hub, or from scratch by named size.

Edits come in one order: embedding size, adapters, frozen parameters. Must not know objectives, ranks or sharding.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, PrivateAttr, model_validator

from fullshard.errors import RecipeError
from fullshard.hf.config import fit_vocabulary, load_config, take_special_tokens
from fullshard.hf.sizes import check_architecture, check_size, make_config
from fullshard.hf.tokenizer import (
    TokenizerTraining,
    at_most,
    fingerprint_of,
    has_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from fullshard.models.base import Family, Weights
from fullshard.part import Section, did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger(__name__)

ATTENTION = ("auto", "sdpa", "eager", "flex_attention", "flash_attention_2", "varlen")

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
"""A folder with none of these has no tokenizer; Transformers would make up an empty one."""


class Lora(Section):
    """Low-rank adapters (peft); the base model is frozen."""

    r: int = Field(16, ge=1)
    """The rank of each adapter."""
    alpha: float = Field(32, gt=0)
    """Adapters are scaled by alpha / r."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before each adapter."""
    targets: str | list[str] = "all-linear"
    """all-linear (every linear layer but the head), names of layers, or one regular expression."""

    @classmethod
    def from_short(cls, value: Any) -> Any:
        if value is True:
            return {}
        return {"r": value} if isinstance(value, int) and not isinstance(value, bool) else value


class Tokenizer(Section):
    """The tokenizer, when it is not the one beside the model."""

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("path", "train"),)

    path: str | None = None
    """A folder or hub name."""
    train: TokenizerTraining | None = None
    """Train a byte-level BPE on the training texts; it is saved with the model."""

    @classmethod
    def from_short(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_of(self) -> Tokenizer:
        if (self.path is None) == (self.train is None):
            raise ValueError("give exactly one of tokenizer.path and tokenizer.train")
        return self


class Hf(Family):
    """A causal language model of Transformers."""

    forward_methods: ClassVar[tuple[str, ...]] = ("hidden_states_and_head",)
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("path", "architecture"), ("path", "size"))

    path: str | None = None
    """A folder or hub name with weights to start from."""
    architecture: str | None = None
    """Start from scratch: a Transformers model type (qwen3, llama, gpt2, ...)."""
    size: str | None = None
    """The named size of the architecture; every architecture has tiny."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Config keys that differ from the size, or from the config beside the weights."""
    tokenizer: Tokenizer | None = None
    """A folder, a hub name, or {train: {vocab_size: N}}; null: the one beside `path`."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    lora: Lora | None = None
    """Train adapters instead of the model: true, a rank, or settings."""
    freeze: list[str] = Field(default_factory=list)
    """Patterns over parameter names that are not trained: model.embed_tokens.*"""
    resize_embedding: bool | None = None
    """Rows of embedding and head: null grows them when the tokenizer needs it, true fits them to the tokenizer exactly,
    false never changes them. New rows start as the mean of the stored ones."""
    attention: str = "auto"
    """auto, sdpa, eager, flex_attention, flash_attention_2 or varlen."""

    _trained_tokenizer: Path | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _consistent(self) -> Hf:
        if (self.path is None) == (self.architecture is None):
            raise ValueError(
                "give exactly one of model.path (weights to start from) and model.architecture (from scratch)"
            )
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
            fetch(str(self.path), revision=self.revision, code=self.trust_remote_code, weights=True, where="model.path")
        if self.tokenizer and self.tokenizer.path:
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
        """The tokenizer; None when none is named and none lies beside the model, which is enough for tokenised data."""
        from fullshard.hf.hub import local_folder

        where = "model.tokenizer"
        if self.tokenizer and self.tokenizer.train:
            folder = self._trained_tokenizer or self.tokenizer.train.folder(cache, fingerprint)
        elif self.tokenizer and self.tokenizer.path:
            folder = local_folder(self.tokenizer.path, revision=None, where=where)
        elif self.path is not None:
            folder, where = self._folder(), "model.path"
            if not has_tokenizer(folder):
                return None
            if not any((folder / name).exists() for name in TOKENIZER_FILES):
                return None
        else:
            return None
        return load_tokenizer(folder, trust_remote_code=self.trust_remote_code, where=where)

    def build(self, *, processor: Any) -> nn.Module:
        from fullshard.hf.edits import add_lora, freeze
        from fullshard.hf.export import stored_conversions
        from fullshard.hf.head import bind

        config = self._config()
        if processor is not None:
            self._fit_vocabulary(config, processor)
        _refuse_layerdrop(config)
        config.use_cache = False
        module = self._empty(config)
        # Before adapters: they replace layers, and the rule is about the model itself.
        rule = bind(module)
        module._weight_conversions = stored_conversions(module)  # type: ignore[assignment]
        logger.info("head: %s", rule.reason)
        if self.lora is not None:
            settings = self.lora
            if self.path is None:
                logger.warning("model.lora on a model from scratch: its random base is frozen and never exported")
            add_lora(
                module,
                r=settings.r,
                alpha=settings.alpha,
                dropout=settings.dropout,
                targets=settings.targets,
                base=self.path,
            )
        freeze(module, self.freeze)
        return module

    def choose_kernels(self, module: nn.Module, *, device: str, compute: torch.dtype, packed: bool) -> str:
        """Settles the attention kernel and says which: `varlen` where packed rows meet a GPU, else the model's own."""
        import torch

        from fullshard.ops.varlen_attention import register

        model: Any = module
        # torch's flash kernels: half precision, and Ampere or newer.
        flash = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
        able = flash and compute in (torch.bfloat16, torch.float16) and model._supports_attention_backend
        if self.attention == "varlen" and not able:
            raise RecipeError(
                "model.attention = 'varlen' needs a GPU of compute capability 8.0, bf16 or fp16, and a model whose "
                f"attention can be replaced, not {device}, {str(compute).removeprefix('torch.')}, "
                f"{type(module).__name__}. Use attention: auto."
            )
        if able and (self.attention == "varlen" or (self.attention == "auto" and packed)):
            model.set_attn_implementation(register())
            model.takes_bounds = True
        return str(model.config._attn_implementation)

    def longest(self, module: nn.Module) -> int | None:
        model: Any = module
        positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return positions if isinstance(positions, int) and positions > 0 else None

    def weights(self, module: nn.Module) -> Weights | None:
        from fullshard.hf.weights import SafetensorsWeights

        if self.path is None:
            return None
        model: Any = module
        rows = model.config.get_text_config(decoder=True).vocab_size
        resized = rows != self._config().get_text_config(decoder=True).vocab_size
        return SafetensorsWeights(self._folder(), module, resized=resized)

    def stored_in(self) -> Path | None:
        """The folder of the weights to start from; None from scratch."""
        return self._folder() if self.path is not None else None

    def initialise(self, unit: nn.Module, *, root: nn.Module) -> None:
        from fullshard.hf.init import initialise_subtree

        initialise_subtree(unit, root=root)

    def storage_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        """fp32 for what is trained; frozen parameters stay in the checkpoint's own half precision, if it has one."""
        import torch

        if parameter.requires_grad or self.path is None:
            return torch.float32
        stored = _stored_dtype(self._folder())
        return stored if stored in (torch.bfloat16, torch.float16) else torch.float32

    def flops_per_token(self, module: nn.Module, *, length: int) -> float:
        """4·N + 2·T + 6·L·d·s, with N parameters, T of them trained, L layers of width d and sequences of s tokens.

        Without frozen parameters that is the usual 6·N + 6·L·d·s. A frozen one still costs its forward (2) and the
        gradient of its input (2), but no gradient of its own. Of a mixture's experts only the chosen ones count.
        """
        model: Any = module
        config = model.config.get_text_config(decoder=True)
        cost = 0.0
        for name, parameter in module.named_parameters():
            share = _active_share(config) if ".experts." in name else 1.0
            cost += share * parameter.numel() * (6.0 if parameter.requires_grad else 4.0)
        return cost + 6.0 * float(config.num_hidden_layers * config.hidden_size * length)

    def export(
        self, module: nn.Module, tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, *, processor: Any
    ) -> None:
        import torch

        from fullshard.hf.edits import has_adapters
        from fullshard.hf.export import export_adapter, export_model

        if has_adapters(module):
            export_adapter(module, tensors, folder, base=self.path, processor=processor)
            return
        source = self._folder() if self.path is not None else None
        dtype = _stored_dtype(source) if source is not None else torch.float32
        export_model(module, tensors, folder, dtype=dtype, source=source, processor=processor)

    def _folder(self) -> Path:
        from fullshard.hf.hub import local_folder

        return local_folder(str(self.path), revision=self.revision, where="model.path")

    def _config(self) -> Any:
        """A fresh config, before it is fitted to a tokenizer."""
        if self.architecture is not None:
            architecture = check_architecture(self.architecture)
            size = check_size(architecture, self.size) if self.size is not None else None
            return make_config(architecture, size, self.overrides)
        return load_config(self._folder(), trust_remote_code=self.trust_remote_code, overrides=self.overrides)

    def _fit_vocabulary(self, config: Any, processor: Any) -> None:
        # A named size keeps the vocabulary of its name; tiny has none of its own.
        exact = self.resize_embedding is True or (self.size == "tiny" and "vocab_size" not in self.overrides)
        new_rows = fit_vocabulary(config, processor, resize=self.resize_embedding, exact=exact)
        if new_rows and self.lora is not None:
            logger.warning("the %d new embedding rows stay as they are: LoRA trains adapters only", new_rows)
        if self.architecture is not None:
            take_special_tokens(config, processor)

    def _empty(self, config: Any) -> nn.Module:
        """The module with parameters on meta and buffers computed."""
        import torch
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM

        # varlen is switched on by whoever provides that kernel; the model is built with the one it replaces.
        chosen = {} if self.attention in ("auto", "varlen") else {"attn_implementation": self.attention}
        config.dtype = torch.float32
        try:
            with init_empty_weights(include_buffers=False):
                module = AutoModelForCausalLM.from_config(config, trust_remote_code=self.trust_remote_code, **chosen)
        except (ImportError, ValueError, RuntimeError, AssertionError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise RecipeError(
                f"model: Transformers cannot build {config.model_type} as asked for ({reason}). "
                "Check model.attention and model.overrides."
            ) from error
        module.tie_weights()
        module.architecture_name = type(module).__name__
        return module  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=8)
def _stored_dtype(folder: Path) -> torch.dtype:
    from fullshard.hf.stored import open_folder

    return open_folder(folder).dtype()


def _refuse_layerdrop(config: Any) -> None:
    share = getattr(config, "layerdrop", None) or 0.0
    if share > 0:
        raise RecipeError(
            f"model: its config has layerdrop = {share:g}, with which each rank leaves out other layers, and sharded "
            "ranks would wait for each other without end. Set model.overrides.layerdrop=0."
        )


def _active_share(config: Any) -> float:
    chosen = getattr(config, "num_experts_per_tok", None)
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if chosen and (number := getattr(config, key, None)):
            return float(chosen) / float(number)
    return 1.0


__all__ = ["Hf", "Lora", "Tokenizer"]
