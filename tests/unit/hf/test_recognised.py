"""Which family a model's folder belongs to, for commands that take a model without a recipe: one, also for adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fullshard.config.part import kinds, part_class
from fullshard.contracts.model import Family

IMAGES = {"preprocessor_config.json": {"image_processor_type": "A", "feature_extractor_type": "CLIPFeatureExtractor"}}
SOUND = {"preprocessor_config.json": {"feature_extractor_type": "WhisperFeatureExtractor"}}
ADAPTER: dict[str, Any] = {"adapter_config.json": {"peft_type": "LORA"}}
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "language": ("hf", {"config.json": {"model_type": "qwen3"}}),
    "language adapter": ("hf", ADAPTER),
    "vision": ("vlm", {"config.json": {"vision_config": {}}, **IMAGES}),
    "vision adapter": ("vlm", {**ADAPTER, **IMAGES}),
    "audio": ("audio_lm", {"config.json": {"audio_config": {"a": 1}}, **SOUND}),
    "speech": ("audio_lm", {"config.json": {"num_mel_bins": 80}, **SOUND}),
    "audio adapter": ("audio_lm", {**ADAPTER, **SOUND}),
    "embedding": ("sentence_transformer", {"config.json": {}, "modules.json": []}),
    "diffusion": ("diffusers", {"model_index.json": {}}),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_belongs_to_one_family(tmp_path: Path, name: str) -> None:
    expected, files = FOLDERS[name]
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content))
    families: list[Any] = [part_class(Family, kind, where="model") for kind in kinds(Family)]
    assert [family.kind() for family in families if family.recognises(tmp_path)] == [expected]
