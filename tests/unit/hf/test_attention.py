"""The kernel that runs when flash attention is asked for and cannot run."""

from __future__ import annotations

import torch

from fullshard.config.part import decode
from fullshard.contracts.model import Family

ASKED = {"architecture": "qwen3", "size": "tiny", "attention": "flash_attention_2"}


def test_flash_attention_on_a_cpu_is_replaced_and_said() -> None:
    """Transformers would refuse to build the model; fullshard builds it with its own kernel."""
    model = decode(Family, ASKED)
    module = model.build(processor=None)
    line = model.choose_kernels(module, device="cpu", compute=torch.float32, packed=True)
    needs = "it needs a GPU of compute capability 8.0 and bf16 or fp16, not cpu and torch.float32"
    assert line == f"sdpa, not flash_attention_2: {needs}"
    own = decode(Family, {**ASKED, "attention": "auto"})
    assert own.choose_kernels(own.build(processor=None), device="cpu", compute=torch.float32, packed=True) == "sdpa"
