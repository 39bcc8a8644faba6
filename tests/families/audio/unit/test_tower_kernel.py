"""The kernel for packed rows is the decoder's alone: a tower has no bounds of documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.families.audio.models.audio_lm import AudioLM
from fullshard.hf.architecture.attention import use_varlen
from fullshard.kernels.varlen_attention import NAME
from fullshard.multimodal.towers import tower_of
from tests.families.audio.small import model_folder


@pytest.mark.parametrize("name", ["phi4_multimodal", "qwen2_audio", "voxtral"])
def test_towers_keep_their_kernel(tmp_path: Path, name: str) -> None:
    path = model_folder(tmp_path / name, name)
    family = AudioLM(path=str(path))
    module: Any = family.build(processor=family.load_processor(path, where="model.path"))
    use_varlen(module)
    assert module.config.get_text_config(decoder=True)._attn_implementation == NAME
    kernels = {
        part.config._attn_implementation
        for name, part in module.named_modules()
        if tower_of(name, module.towers) != "language"
        and "attention" in type(part).__name__.lower()
        and hasattr(part, "config")
    }
    assert kernels
    assert NAME not in kernels


def test_towers_are_no_part_of_the_cost_of_a_token(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "qwen2_audio", "qwen2_audio")
    family = AudioLM(path=str(path))
    module: Any = family.build(processor=family.load_processor(path, where="model.path"))
    language = sum(p.numel() for n, p in module.named_parameters() if tower_of(n, module.towers) == "language")
    assert family.flops_per_token(module, length=0) == 6 * language


def test_fp16_on_a_gpu_runs_the_depthwise_convolutions_of_a_tower_without_cudnn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))  # a card for which fp16 is chosen
    path = model_folder(tmp_path / "phi4", "phi4_multimodal")
    family = AudioLM(path=str(path))
    module: Any = family.build(processor=family.load_processor(path, where="model.path"))
    convolutions = [
        part
        for part in module.modules()
        if isinstance(part, (nn.Conv1d, nn.Conv2d)) and part.groups == part.in_channels > 1
    ]
    assert convolutions
    in_bf16 = family.choose_kernels(module, device="cuda", compute=torch.bfloat16, packed=False)
    assert "cuDNN" not in in_bf16.partition(";")[2]
    in_fp16 = family.choose_kernels(module, device="cuda", compute=torch.float16, packed=False)
    assert in_fp16.endswith(f"; {len(convolutions)} depthwise convolutions without cuDNN")
