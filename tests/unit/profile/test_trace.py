"""Where the time of a trace goes, against traces that are written by hand: one of a CPU, one of a GPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fullshard.profile.kinds import KINDS, kind_of
from fullshard.profile.table import as_json, as_text
from fullshard.profile.trace import PHASES, read_trace, summarise

MAIN, ENGINE = 1, 2


def event(name: str, begin: float, end: float, *, cat: str = "cpu_op", tid: int = MAIN, **args: Any) -> dict[str, Any]:
    """Times are in milliseconds."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": begin * 1e3,
        "dur": (end - begin) * 1e3,
        "tid": tid,
        "args": args,
    }


def mark(name: str, begin: float, end: float) -> dict[str, Any]:
    return event(name, begin, end, cat="user_annotation")


def host(offset: float) -> list[dict[str, Any]]:
    """The marks of one step of 100 ms: 10 of data, 40 forward, 20 backward, 10 of checks, 15 of updates, 3 of log."""
    return [
        mark("ProfilerStep#5", offset, offset + 100),
        mark("fullshard::data", offset + 0, offset + 10),
        mark("fullshard::compute", offset + 10, offset + 95),
        event("autograd::engine::evaluate_function: Mm", offset + 50, offset + 70),
        mark("Optimizer.step#AdamW.step", offset + 80, offset + 95),
        mark("fullshard::log", offset + 95, offset + 98),
    ]


def on_cpu(offset: float) -> list[dict[str, Any]]:
    return [
        *host(offset),
        event("aten::linear", offset + 12, offset + 30),
        event("aten::mm", offset + 14, offset + 28),
        mark("FSDP::all_gather", offset + 31, offset + 39),
        event("aten::copy_", offset + 32, offset + 34),
        event("aten::native_layer_norm", offset + 40, offset + 44),
        event("aten::mm", offset + 52, offset + 66),
        event("aten::mul_", offset + 82, offset + 92),
        event("aten::mm", offset + 12, offset + 90, tid=9),
    ]


def test_a_trace_of_a_cpu() -> None:
    found = summarise([*on_cpu(0), *on_cpu(100), event("aten::mm", 300, 400)])
    assert (found.steps, found.seconds, found.gpu) == (2, 0.2, False)
    phases = {"data": 20, "forward": 80, "backward": 40, "clip and checks": 20, "optimizer": 30, "log": 6}
    assert found.phases == pytest.approx({**dict.fromkeys(PHASES, 0), **{k: v / 1e3 for k, v in phases.items()}})
    kinds = {"matrix products": 64, "normalisation": 8, "optimizer": 20, "communication": 16}
    idle = 200 - sum(kinds.values())
    assert found.kinds == pytest.approx(
        {**dict.fromkeys(KINDS, 0), **{k: v / 1e3 for k, v in kinds.items()}, "idle": idle / 1e3}
    )
    assert found.most[0][:3] == ("aten::mm", "matrix products", 4)
    assert found.most[0][3] == pytest.approx(0.056)


def launch(number: int, at: float, *, tid: int = MAIN) -> dict[str, Any]:
    return event("cudaLaunchKernel", at, at + 0.01, cat="cuda_runtime", tid=tid, correlation=number)


def kernel(name: str, number: int, begin: float, end: float, *, cat: str = "kernel") -> dict[str, Any]:
    return event(name, begin, end, cat=cat, tid=7, correlation=number)


def test_a_trace_of_a_gpu() -> None:
    events = [
        *host(0),
        *(launch(1, 12), launch(2, 13), launch(3, 14), launch(4, 51, tid=ENGINE), launch(5, 81), launch(6, 82)),
        kernel("nvjet_hsh_128x256", 1, 20, 40),
        kernel("ncclDevKernel_AllGather_RING", 2, 30, 50),
        kernel("Memcpy HtoD", 3, 15, 17, cat="gpu_memcpy"),
        kernel("pytorch_flash::flash_bwd_kernel", 4, 55, 75),
        kernel("multi_tensor_apply_kernel", 5, 85, 95),
        kernel("ncclDevKernel_AllReduce", 6, 96, 98),
        kernel("late", 7, 150, 160),
    ]
    found = summarise(events)
    assert found.gpu
    kinds = {"matrix products": 20, "attention": 20, "optimizer": 10, "communication": 22, "copies": 2, "idle": 36}
    assert found.kinds == pytest.approx({**dict.fromkeys(KINDS, 0), **{k: v / 1e3 for k, v in kinds.items()}})
    assert found.exposed == pytest.approx(0.012), "half of the gather is hidden behind a product"
    device = {"forward": 42, "backward": 20, "optimizer": 12}
    assert found.device == pytest.approx({**dict.fromkeys(PHASES, 0), **{k: v / 1e3 for k, v in device.items()}})
    text = as_text(as_json(found, rank=0, first_step=5))
    assert "Profile of steps 5 to 5 on rank 0: 100.00 ms a step" in text
    assert "communication while nothing else runs: 12.00 ms" in text


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop>", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("aten::native_layer_norm_backward", "normalisation"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "normalisation"),
        ("triton_poi_fused_mul_silu_5", "elementwise"),
        ("triton_tem_fused_mm_1", "matrix products"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("gloo:all_gather", "communication"),
        ("FSDP::post_backward_reduce", "communication"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("aten::copy_", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, MulFunctor>", "elementwise"),
        ("aten::mul", "elementwise"),
    ],
)
def test_kinds_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_trace_without_steps_and_one_from_a_file(tmp_path: Path) -> None:
    assert summarise([event("aten::mm", 0, 1)]).steps == 0
    others = [{"ph": "M", "name": "thread_name"}, {"ph": "i", "ts": 1, "name": "start"}]
    with gzip.open(tmp_path / "t.json.gz", "wt") as file:
        json.dump({"traceEvents": [*others, *on_cpu(0)]}, file)
    assert summarise(read_trace(tmp_path / "t.json.gz")).steps == 1
