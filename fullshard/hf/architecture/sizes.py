"""Named sizes over Transformers architectures, and `tiny` for every one of them.

A size is a set of config keys; everything else is the architecture's own default. Must not build modules or know
tokenizers, weights or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fullshard.config.part import did_you_mean
from fullshard.errors import RecipeError


def _decoder(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    """The keys that nearly every decoder since Llama shares."""
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


_QWEN3: dict[str, Any] = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960, **_rope(1e6)}
_QWEN2: dict[str, Any] = {"vocab_size": 151936, "max_position_embeddings": 32768, **_rope(1e6)}
_LLAMA3: dict[str, Any] = {"vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5} | _rope(
    5e5,
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
_LLAMA32: dict[str, Any] = _LLAMA3 | {"rope_parameters": {**_LLAMA3["rope_parameters"], "factor": 32.0}}
_LLAMA: dict[str, Any] = {"vocab_size": 32000, "max_position_embeddings": 4096, **_rope(1e4)}
_NEOX: dict[str, Any] = {"vocab_size": 50304, "max_position_embeddings": 2048}
_OPT: dict[str, Any] = {"vocab_size": 50272, "max_position_embeddings": 2048}


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": 50257, "n_positions": 1024}


def _neox(width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**shape, "intermediate_size": 4 * width, **_NEOX, **more}


def _opt(width: int, layers: int, heads: int) -> dict[str, Any]:
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**shape, "ffn_dim": 4 * width, "word_embed_proj_dim": width, **_OPT}


SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3": {
        "0.6B": _decoder(1024, 3072, 28, 16, 8, tie_word_embeddings=True, **_QWEN3),
        "1.7B": _decoder(2048, 6144, 28, 16, 8, tie_word_embeddings=True, **_QWEN3),
        "4B": _decoder(2560, 9728, 36, 32, 8, tie_word_embeddings=True, **_QWEN3),
        "8B": _decoder(4096, 12288, 36, 32, 8, **_QWEN3),
        "14B": _decoder(5120, 17408, 40, 40, 8, **_QWEN3),
        "32B": _decoder(5120, 25600, 64, 64, 8, **_QWEN3),
    },
    "qwen2": {
        "0.5B": _decoder(896, 4864, 24, 14, 2, tie_word_embeddings=True, **_QWEN2),
        "1.5B": _decoder(1536, 8960, 28, 12, 2, tie_word_embeddings=True, **_QWEN2),
        "7B": _decoder(3584, 18944, 28, 28, 4, **(_QWEN2 | {"vocab_size": 152064})),
    },
    "llama": {
        "89M": _decoder(512, 1344, 18, 8, 8, **_LLAMA),
        "243M": _decoder(1024, 2560, 15, 16, 16, **_LLAMA),
        "1B": _decoder(2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True, **_LLAMA32),
        "1.8B": _decoder(2048, 5632, 33, 16, 16, **_LLAMA),
        "3B": _decoder(3072, 8192, 28, 24, 8, head_dim=128, tie_word_embeddings=True, **_LLAMA32),
        "4.0B": _decoder(3072, 8192, 34, 24, 24, **_LLAMA),
        "8B": _decoder(4096, 14336, 32, 32, 8, **_LLAMA3),
        "8.5B": _decoder(4096, 14336, 34, 32, 8, **_LLAMA3),
        "15.7B": _decoder(5120, 16384, 46, 40, 8, **_LLAMA3),
        "32.7B": _decoder(6144, 22528, 62, 48, 8, **_LLAMA3),
        "70B": _decoder(8192, 28672, 80, 64, 8, **_LLAMA3),
    },
    "mistral": {
        "7B": _decoder(4096, 14336, 32, 32, 8, vocab_size=32768, sliding_window=None, **_rope(1e6)),
    },
    "gemma": {
        "2B": _decoder(2048, 16384, 18, 8, 1, head_dim=256, vocab_size=256000),
        "7B": _decoder(3072, 24576, 28, 16, 16, head_dim=256, vocab_size=256000),
    },
    "gemma3_text": {
        "270M": _decoder(640, 2048, 18, 4, 1, head_dim=256, vocab_size=262144, sliding_window=512),
        "1B": _decoder(1152, 6912, 26, 4, 1, head_dim=256, vocab_size=262144, sliding_window=512),
    },
    "phi": {
        "1.3B": _decoder(2048, 8192, 24, 32, 32, vocab_size=51200, max_position_embeddings=2048),
        "2.7B": _decoder(2560, 10240, 32, 32, 32, vocab_size=51200, max_position_embeddings=2048),
    },
    "phi3": {
        "mini": _decoder(3072, 8192, 32, 32, 32, vocab_size=32064, max_position_embeddings=4096),
    },
    "gpt2": {
        "124M": _gpt2(768, 12, 12),
        "355M": _gpt2(1024, 24, 16),
        "774M": _gpt2(1280, 36, 20),
        "1.5B": _gpt2(1600, 48, 25),
    },
    "gpt_neox": {
        "70M": _neox(512, 6, 8),
        "160M": _neox(768, 12, 12),
        "410M": _neox(1024, 24, 16),
        "1B": _neox(2048, 16, 8),
        "1.4B": _neox(2048, 24, 16),
        "2.8B": _neox(2560, 32, 32),
        "6.9B": _neox(4096, 32, 32, vocab_size=50432),
    },
    "opt": {
        "125M": _opt(768, 12, 12),
        "1.3B": _opt(2048, 24, 32),
        "6.7B": _opt(4096, 32, 32),
    },
}
"""Architecture -> size -> config keys."""

_TINY: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("tiny.yaml").read_text(encoding="utf-8"))
UNFIT: dict[str, str] = _TINY["unfit"]
"""Model types that cannot be trained on tokens alone, and why."""


def architectures() -> list[str]:
    """The model types that Transformers can build as a causal language model of text; each has a size tiny."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - UNFIT.keys())


def size_names(architecture: str) -> list[str]:
    """The named sizes of an architecture, smallest first."""
    return ["tiny", *SIZES.get(architecture, {})]


def check_architecture(architecture: str, *, where: str = "model.architecture") -> str:
    """The model type as Transformers spells it, or an error with the nearest one."""
    known = architectures()
    spelled = {name.replace("-", "_").lower(): name for name in known}
    found = spelled.get(plain := architecture.replace("-", "_").lower())
    if plain in UNFIT:
        raise RecipeError(
            f"{where} = {architecture!r} cannot be trained as a language model: {UNFIT[plain]}. Choose another one; "
            f"with named sizes: {', '.join(SIZES)}."
        )
    if found is None:
        raise RecipeError(
            f"{where} = {architecture!r} is not a causal language model that Transformers knows"
            f"{did_you_mean(architecture, known)}. With named sizes: {', '.join(SIZES)}; "
            f"with size tiny or overrides: any of its {len(known)} model types. For a model on disk or on the hub "
            "write model.path instead."
        )
    return found


def check_size(architecture: str, size: str, *, where: str = "model.size") -> str:
    """The size as it is named here, or an error that lists the known ones."""
    known = size_names(architecture)
    spelled = {name.lower().removesuffix(".0b").removesuffix("b"): name for name in known}
    found = spelled.get(size.lower().removesuffix(".0b").removesuffix("b"))
    if found is None:
        raise RecipeError(
            f"{where} = {size!r} is not a known size of {architecture}{did_you_mean(size, known)}. "
            f"Known: {', '.join(known)}. Choose one, or give the shape in model.overrides."
        )
    return found


def make_config(architecture: str, size: str | None, overrides: Mapping[str, Any]) -> Any:
    """The Transformers config of a size with the overrides on top."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[architecture]
    try:
        default = config_class()
        check_overrides(overrides, default, what=f"the config of {architecture}")
        keys = tiny_keys(default) if size == "tiny" else SIZES[architecture][size] if size else {}
        config = config_with(config_class, {**keys, **overrides})
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(
            f"model.architecture = {architecture!r}, size = {size!r}, overrides = {dict(overrides)!r}: Transformers "
            f"does not accept this shape: {_last_line(error)}. Give the keys it asks for in model.overrides."
        ) from error
    return config


def tiny_keys(config: Any) -> dict[str, Any]:
    """The keys of `tiny` that this config has, in every sub-config as well (towers)."""
    keys: dict[str, Any] = {name: value for name, value in _TINY["tiny"].items() if _has(config, name)}
    if "num_key_value_heads" in keys and config.num_key_value_heads == getattr(config, "num_attention_heads", None):
        keys["num_key_value_heads"] = keys["num_attention_heads"]
    if "qk_rope_head_dim" in keys:
        # Low-rank attention derives its own; a head_dim would set the rotary width instead.
        keys.pop("head_dim", None)
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    keys |= {name: tiny_keys(part) for name, part in parts.items() if hasattr(part, "sub_configs")}
    for name, value in _TINY["tiny_of"].get(config.model_type, {}).items():
        keys[name] = {**keys[name], **value} if name in parts and name in keys else value
    return keys


def config_with(config_class: Any, keys: Mapping[str, Any]) -> Any:
    """A config with these keys; special tokens outside its vocabulary are dropped: they belong to another one."""
    default = config_class()
    vocabulary = keys.get("vocab_size", getattr(default, "vocab_size", None))
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    foreign = [n for n in names if vocabulary and isinstance(i := getattr(default, n, None), int) and i >= vocabulary]
    try:
        config = config_class(**{**dict.fromkeys(foreign), **keys})
    except Exception:
        # A few config classes require a number; any other error is raised again.
        config = config_class(**{**dict.fromkeys(foreign, 0), **keys})
    text = config.get_text_config(decoder=True)
    for name in names:
        if isinstance(value := getattr(text, name, None), int) and value >= text.vocab_size:
            try:
                setattr(text, name, None)
            except Exception:
                setattr(text, name, 0)
    return config


def _has(config: Any, name: str) -> bool:
    """Whether the config takes this key: it has it, and it is not computed."""
    target = config.attribute_map.get(name, name)
    if isinstance(getattr(type(config), target, None), property):
        return False
    try:
        return hasattr(config, name)
    except Exception:
        # Some configs raise for keys that vary by layer; these are never set.
        return False


def check_overrides(overrides: Mapping[str, Any], config: Any, *, what: str) -> None:
    """Refuses an override that the config does not have, since Transformers would keep it without effect."""
    known = sorted({*config.to_dict(), *config.attribute_map} - {"model_type", "transformers_version", "architectures"})
    for key in overrides:
        if key not in known:
            raise RecipeError(
                f"model.overrides.{key} is not a key of {what}{did_you_mean(key, known)}. Known: {', '.join(known)}."
            )


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip().rstrip(".")
