"""Our Triton kernels compile for a GPU: the interpreter takes Python that the compiler does not. No GPU is needed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

HALF, WHOLE = "*bf16", "*fp32"
FP32 = ("sums", "moments", "logs", "products")
NORM = {"WIDTH": 1152, "FIRST": 1024, "REST": 128}
ATTENTION = {"TOKENS": 256, "HEADS": 16, "WIDTH": 72, "FIRST": 64, "REST": 16, "OWN": 64, "OTHER": 64}
KERNELS: dict[str, dict[str, Any]] = {
    "biased_gelu._forward": {"TILE": 8, "COLUMNS": 256},
    "biased_gelu._backward": {"TILE": 8, "TILES": 32, "COLUMNS": 256},
    "gated_sum._backward": {"WIDTH": 1152, "TILE": 4, "TILES": 16, "COLUMNS": 128},
    "modulated_norm._forward": {**NORM, "GATED": True},
    "modulated_norm._backward": {**NORM, "GATED": True, "TOKENS": 64},
    "packed_attention._forward": ATTENTION,
    "packed_attention._multiply": {key: value for key, value in ATTENTION.items() if key != "OTHER"},
    "packed_attention._backward_queries": ATTENTION,
    "packed_attention._backward_keys": {**ATTENTION, "TOKENS": 250},
}
NUMBERS = {"eps": "fp32", "factor": "fp32"} | dict.fromkeys(
    ("num_rows", "width", "tokens", "gate_stride", "scale_stride", "shift_stride"), "i32"
)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns of another default to come
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, function = name.partition(".")
    kernel = getattr(importlib.import_module(f"fullshard.families.diffusion.kernels.{module}"), function)
    fixed = KERNELS[name]
    signature = {
        argument: "constexpr" if argument in fixed else NUMBERS.get(argument, WHOLE if argument in FP32 else HALF)
        for argument in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert ".visible .entry" in compiled.asm["ptx"]
    # Products of attention on tensor cores.
    assert ("wgmma" in compiled.asm["ptx"]) == (module == "packed_attention" and function != "_multiply")
