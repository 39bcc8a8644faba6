"""What the diffusers family answers when the engine and the tools ask about a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fullshard.config.part import decode
from fullshard.contracts.model import Family
from fullshard.contracts.objective import Objective


def test_no_tokens_are_predicted() -> None:
    assert not decode(Objective, {"kind": "flow_matching"}).predicts_tokens


def test_names_on_the_hub_and_kernels() -> None:
    denoiser = decode(Family, {"kind": "diffusers", "path": "a/b"})
    assert (denoiser.hub_names(), denoiser.attention_kernel()) == ({"model.path": ("a/b", None)}, None)


@pytest.mark.parametrize(
    ("files", "is_ours"),
    [
        ({"model_index.json": {}}, True),
        ({"config.json": {"_class_name": "DiTTransformer2DModel"}}, True),
        ({"config.json": {"model_type": "gpt2"}}, False),
        ({"model_index.json": {}, "modules.json": []}, False),
    ],
)
def test_folders_of_denoisers(tmp_path: Path, files: dict[str, Any], is_ours: bool) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert type(decode(Family, {"kind": "diffusers", "path": "a"})).recognises(tmp_path) == is_ours
