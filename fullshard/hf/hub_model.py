"""What families built on Hugging Face libraries share: a config, PEFT adapters, weights by path or hub name.

Must not know which library, objectives, ranks or sharding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fullshard.contracts.model import Family
from fullshard.hf.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import nn

    from fullshard.hf.adapters.settings import Lora

_NOISE = ("drop", "jitter")
"""Keys of a config that are the probability or size of random noise contain one of these."""


class HubModel(Family):
    """A model with a config, from a folder or the hub."""

    if TYPE_CHECKING:
        path: str | None
        revision: str | None
        overrides: dict[str, Any]
        lora: Lora | None

    @classmethod
    def with_base(cls, settings: dict[str, Any], base: str, *, is_checkpoint: bool) -> dict[str, Any] | None:
        if is_checkpoint:
            return {**settings, "from": base}
        adapter = settings.get("base") or (Path(str(settings.get("path"))) / "adapter_config.json").is_file()
        return {**settings, "base": base} if adapter else super().with_base(settings, base, is_checkpoint=False)

    def config_of(self, module: nn.Module) -> dict[str, Any]:
        config: Any = module.config
        return dict(config if isinstance(config, Mapping) else config.to_dict())

    def hub_names(self) -> dict[str, tuple[str, str | None]]:
        return {"model.path": (self.path, self.revision)} if self.path else {}

    def without_noise(self, module: nn.Module, *, fp32: bool) -> Self:
        config = self.config_of(module)
        noisy = [key for key, value in config.items() if isinstance(value, float) and any(n in key for n in _NOISE)]
        changes: dict[str, Any] = {"overrides": {**self.overrides, **{key: 0.0 for key in noisy if config[key] > 0}}}
        if self.lora is not None:
            changes["lora"] = self.lora.model_copy(update={"dropout": 0.0})
        return self.model_copy(update=changes)

    def adapters(self, module: nn.Module) -> set[str]:
        from fullshard.hf.adapters.edits import is_adapter

        return {name for name, _ in module.named_parameters() if is_adapter(name)}

    def exports(self, module: nn.Module, name: str) -> bool:
        from fullshard.hf.adapters.edits import has_adapters, is_adapter
        from fullshard.hf.scalars import is_scalar

        return is_adapter(name) or not (has_adapters(module) or is_scalar(name))


class TokenHubModel(HubModel):
    """A hub model that takes tokens: with an embedding, a tokenizer and a choice of attention kernels."""

    if TYPE_CHECKING:
        attention: str
        tokenizer: Tokenizer | None

    def without_noise(self, module: nn.Module, *, fp32: bool) -> Self:
        quiet = super().without_noise(module, fp32=fp32)
        half_only = fp32 and self.attention in ("varlen", "flash_attention_2", "flash_attention_4")
        return quiet.model_copy(update={"attention": "auto"}) if half_only else quiet

    def unpacked(self) -> Self:
        packed = self.attention in ("varlen", "flex_attention", "flash_attention_4")
        return self.model_copy(update={"attention": "auto"}) if packed else self

    def attention_kernel(self) -> str:
        return self.attention

    def hub_names(self) -> dict[str, tuple[str, str | None]]:
        tokenizer = self.tokenizer.path if self.tokenizer else None
        return super().hub_names() | ({"model.tokenizer": (tokenizer, None)} if tokenizer else {})

    def with_processor(self, folder: Path) -> Self:
        return self.model_copy(update={"tokenizer": Tokenizer(path=str(folder))})

    def problems(self, module: nn.Module) -> list[tuple[str, str]]:
        model: Any = module
        text = model.config.get_text_config(decoder=True)
        heads, groups = getattr(text, "num_attention_heads", None), getattr(text, "num_key_value_heads", None)
        if not (isinstance(heads, int) and isinstance(groups, int) and groups > 0 and heads % groups):
            return []
        found = f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {groups}"
        text = f"config.json: {found}, so heads cannot share keys evenly."
        return [(text, "Correct config.json, or model.overrides.")]

    def embedding_rows(self, module: nn.Module) -> int:
        model: Any = module
        return int(model.get_input_embeddings().num_embeddings)
