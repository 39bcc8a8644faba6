"""What the Transformers family answers when the engine and the tools ask about a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fullshard.config.part import decode, plain
from fullshard.contracts.model import Family
from fullshard.contracts.objective import Objective


def test_next_tokens_are_predicted() -> None:
    assert decode(Objective, {"kind": "causal_lm"}).predicts_tokens


def test_names_on_the_hub_and_kernels() -> None:
    family = decode(Family, {"path": "a/b", "revision": "main", "tokenizer": "c/d", "attention": "varlen"})
    assert family.hub_names() == {"model.path": ("a/b", "main"), "model.tokenizer": ("c/d", None)}
    assert (family.attention_kernel(), family.unpacked().attention_kernel()) == ("varlen", "auto")
    assert family.with_processor(Path("e")).hub_names()["model.tokenizer"] == ("e", None)


def test_a_model_without_noise() -> None:
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 16}
    settings = {
        "architecture": "gpt2",
        "size": "tiny",
        "overrides": {**sizes, "attn_pdrop": 0.1},
        "lora": {"dropout": 0.5},
    }
    noisy = decode(Family, {**settings, "attention": "flash_attention_2"})
    module = decode(Family, settings).build(processor=None)
    quiet = plain(noisy.without_noise(module, fp32=True))
    assert quiet["overrides"]["attn_pdrop"] == quiet["overrides"]["resid_pdrop"] == quiet["lora"]["dropout"] == 0.0
    assert quiet["attention"] == "auto"
    assert plain(noisy.without_noise(module, fp32=False))["attention"] == "flash_attention_2"
    names = noisy.adapters(module)
    assert names
    assert names == {name for name, p in module.named_parameters() if p.requires_grad}
    assert noisy.embedding_rows(module) == 16


def test_a_base_that_has_moved(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    family = type(decode(Family, {"path": "a/b"}))
    assert family.with_base({"path": "a/b"}, "new", is_checkpoint=False) == {"path": "new"}
    assert family.with_base({"path": "a/b"}, "new", is_checkpoint=True) == {"path": "a/b", "from": "new"}
    adapter = {"path": str(tmp_path)}
    assert family.with_base(adapter, "new", is_checkpoint=False) == {**adapter, "base": "new"}
    assert family.with_base({"architecture": "gpt2"}, "new", is_checkpoint=False) is None


@pytest.mark.parametrize(
    ("files", "is_ours"),
    [
        ({"config.json": {"model_type": "gpt2"}}, True),
        ({"adapter_config.json": {}}, True),
        ({"config.json": {"model_type": "bert"}, "modules.json": []}, False),
        ({"config.json": {"_class_name": "DiTTransformer2DModel"}}, False),
        ({"config.json": {}, "model_index.json": {}}, False),
        ({"notes.txt": {}}, False),
    ],
)
def test_folders_of_plain_transformers_models(tmp_path: Path, files: dict[str, Any], is_ours: bool) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert type(decode(Family, {"path": "a"})).recognises(tmp_path) == is_ours
