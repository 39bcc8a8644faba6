"""The kind of work that an operator or a kernel does, by its name. Must not know traces, times or torch."""

from __future__ import annotations

import re

KINDS = (
    "matrix products",
    "attention",
    "normalisation",
    "elementwise",
    "optimizer",
    "communication",
    "copies",
    "idle",
)
"""In the order of a table. `optimizer` is whatever runs inside its step; `idle` is time without any work."""
_RULES = (
    (
        "communication",
        r"nccl|c10d|gloo|fsdp::|all_?gather|all_?reduce|reduce_?scatter|broadcast_coalesced|record_param_comms",
    ),
    ("attention", r"attention|attn|flash_|flash::|fmha|flex_"),
    ("normalisation", r"layer_?norm|rms_?norm|group_?norm|batch_?norm|native_norm"),
    (
        "matrix products",
        r"gemm|nvjet|cutlass|xmma|cublas|wgmma|_mm\b|::(?:mm|bmm|addmm|baddbmm|addmv|addbmm|matmul|linear|einsum)\b"
        r"|conv(?:olution|\dd|_depthwise)|mkldnn|grouped_mm|scaled_mm|splitk",
    ),
    (
        "copies",
        r"memcpy|memset|::copy_|_to_copy|::clone|::contiguous|::cat\b|_cat_|catarray|split_with_sizes_copy|chunk_cat"
        r"|::index_select|gather|scatter|::to\b|unrolled_copy|direct_copy|::fill_|::zero_",
    ),
)
_COMPILED = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _RULES}


def kind_of(name: str) -> str:
    """One of KINDS; what no rule names is elementwise, and so is a compiled kernel that fuses several kinds."""
    if name.startswith("triton_"):
        # Inductor names a kernel after what it fuses. A reduction over a row in it is a norm or a softmax.
        return "matrix products" if re.match(r"triton_tem_", name) else _fused(name)
    return next((kind for kind, pattern in _COMPILED.items() if pattern.search(name)), "elementwise")


def _fused(name: str) -> str:
    return "normalisation" if re.search(r"rsqrt|layer_norm|rms_norm", name) else "elementwise"
