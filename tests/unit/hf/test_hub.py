"""Which files of a hub model are fetched: by the hub's own filter, over lists of files as they lie there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from fullshard.hf import hub

PLAIN = ["config.json", "model.safetensors", "tokenizer.json", "vocab.txt"]
MODULES = [
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json"),
    *("2_Dense/config.json", "2_Dense/model.safetensors", "3_Dense/config.json", "3_Dense/pytorch_model.bin"),
]
WANTED: dict[str, list[str]] = {
    "a plain model": PLAIN,
    "in several files": ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"],
    "an adapter": ["adapter_config.json", "adapter_model.bin", "adapter_model.safetensors"],
    "sentence-transformers": [*PLAIN, *MODULES],
    "its backbone in a folder": ["modules.json", *(f"0_Transformer/{name}" for name in PLAIN), "1_Pooling/config.json"],
    "widths to choose from": ["2_Dense_1024/config.json", "2_Dense_1024/model.safetensors"],
}
UNWANTED = [
    *("pytorch_model.bin", "0_Transformer/pytorch_model.bin", "model.gguf", "README.md", "modeling.py"),
    *("onnx/model.onnx", "openvino/openvino_model.bin", "original/consolidated.safetensors"),
    *("consolidated.safetensors", "vae/model.safetensors", "checkpoint-10/model.safetensors"),
    *("1/model.safetensors", "10/model.safetensors", "8b/model.safetensors", "old/2_Dense/model.safetensors"),
]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What would be fetched of everything that is listed above; the list is filled by the call."""
    found: list[str] = []

    def snapshot_download(name: str, *, allow_patterns: Any, ignore_patterns: Any, **_: Any) -> str:
        everything = sorted({*UNWANTED, *(file for files in WANTED.values() for file in files)})
        found.extend(filter_repo_objects(everything, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return found


def test_weights_and_settings(fetched: list[str]) -> None:
    hub.fetch("owner/model", revision=None, code=False, weights=True, where="model.path")
    for kind, files in WANTED.items():
        assert [file for file in files if file not in fetched] == [], kind
    assert [file for file in UNWANTED if file in fetched] == []


def test_a_tokenizer_alone_comes_without_weights(fetched: list[str]) -> None:
    hub.fetch("owner/model", revision=None, code=True, weights=False, where="model.tokenizer")
    assert {"tokenizer.json", "modules.json", "modeling.py"} <= set(fetched)
    assert [file for file in fetched if file.endswith((".safetensors", ".bin"))] == []
