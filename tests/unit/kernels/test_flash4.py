"""FlashAttention-4: when it is used and what is said when it is not; its operators, with a stand-in for the wheel."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from fullshard.config.part import decode
from fullshard.contracts.model import Family
from fullshard.kernels import flash4
from tests.near import assert_near

HOPPER = (9, 0)
BOUNDS = torch.tensor([0, 5, 6, 14], dtype=torch.int32)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The stand-in, installed as the wheel is: `flash_attn` has no __init__.py."""
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    stands_in = "from tests.unit.kernels.flash4_wheel import _flash_attn_bwd, _flash_attn_fwd\n"
    (folder / "interface.py").write_text(stands_in)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(flash4, "version", lambda name: {"flash-attn-4": "4.0.0b36"}[name])
    flash4._functions.cache_clear()
    yield importlib.import_module("flash_attn.cute.interface")
    flash4._functions.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: tuple[int, int]) -> torch.Tensor:
    """torch's own attention, one document at a time."""
    parts = []
    for start, stop in zip(BOUNDS[:-1].tolist(), BOUNDS[1:].tolist(), strict=True):
        distance = torch.arange(stop - start)[None] - torch.arange(stop - start)[:, None]
        seen = torch.ones_like(distance, dtype=torch.bool)
        for size, away in zip(window, (-distance, distance), strict=True):
            seen &= (away <= size) if size >= 0 else torch.ones_like(seen)
        rows = [t[start:stop].transpose(0, 1)[None] for t in (q, k, v)]
        parts.append(functional.scaled_dot_product_attention(*rows, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(parts)


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(14, heads, 8, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (2, 0), (2, 2)], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_results_and_gradients_are_those_of_sdpa(
    wheel: types.ModuleType, window: tuple[int, int], compiled: bool
) -> None:
    ours, theirs = inputs(), inputs()

    def attend(*rows: torch.Tensor) -> torch.Tensor:
        return flash4.attend(*rows, BOUNDS, 8, scale=None, window=window)

    # One graph: a break would raise.
    found = (torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend)(*ours)
    reference = expected(*theirs, window=window)
    assert_near(found, reference)
    gradient = torch.randn_like(reference)
    for one, other in zip(
        torch.autograd.grad(found, ours, gradient), torch.autograd.grad(reference, theirs, gradient), strict=True
    ):
        assert_near(one, other)


def test_the_operators_are_registered_as_torch_demands(wheel: types.ModuleType) -> None:
    """Shapes, strides and dtypes of the fake operators, and that gradients are registered."""
    for dtype in (torch.float32, torch.bfloat16):
        rows = [each.detach().to(dtype).requires_grad_() for each in inputs()]
        settings = (BOUNDS, 8, 0.5, -1, 0)
        torch.library.opcheck(
            flash4._attention,
            (*rows, *settings),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )
        rows = [each.detach() for each in rows]
        out, lse = flash4._attention(*rows, *settings)
        torch.library.opcheck(
            flash4._gradients, (out, *rows, out, lse, *settings), test_utils=("test_schema", "test_faketensor")
        )


def test_recomputation_keeps_its_result() -> None:
    from fullshard.dist.recompute import KEPT

    assert any(name in str(torch.ops.fullshard.flash4_packed_attention.default) for name in KEPT)


def test_a_model_trains_through_it(wheel: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen as on a GPU; the predictions for two packed documents are those of sdpa for each alone."""
    family = decode(Family, {"architecture": "qwen3", "size": "tiny", "attention": "flash_attention_4"})
    torch.manual_seed(0)
    module: Any = AutoModelForCausalLM.from_config(family.build(processor=None).config)
    on_gpu(monkeypatch, HOPPER)
    said = family.choose_kernels(module, device="cuda", compute=torch.bfloat16, packed=True)
    assert said == flash4.NAME
    assert module.takes_bounds
    ids, positions = torch.randint(3, 90, (1, 14)), torch.tensor([[*range(5), *range(1), *range(8)]])
    packed = module(
        input_ids=ids,
        position_ids=positions,
        cu_seq_lens_q=BOUNDS,
        cu_seq_lens_k=BOUNDS,
        max_length_q=8,
        max_length_k=8,
    ).logits
    module.set_attn_implementation("sdpa")
    for start, stop in ((0, 5), (5, 6), (6, 14)):
        assert_near(packed[:, start:stop], module(input_ids=ids[:, start:stop]).logits, 1e-4)


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)


@pytest.mark.parametrize(
    ("capability", "packed", "said"),
    [
        (HOPPER, True, "fullshard_varlen, not flash_attention_4: the package flash-attn-4 is not installed"),
        ((8, 0), True, "fullshard_varlen, not flash_attention_4: it needs a GPU of compute capability 9.0, found 8.0"),
    ],
)
def test_without_it_the_present_kernel_runs_and_the_header_says_why(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], packed: bool, said: str
) -> None:
    family = decode(Family, {"architecture": "qwen3", "size": "tiny", "attention": "flash_attention_4"})
    module = family.build(processor=None)
    on_gpu(monkeypatch, capability)
    line = family.choose_kernels(module, device="cuda", compute=torch.bfloat16, packed=packed)
    assert line.startswith(said)


def test_rows_that_are_not_packed_keep_sdpa(wheel: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    family = decode(Family, {"architecture": "qwen3", "size": "tiny", "attention": "flash_attention_4"})
    module = family.build(processor=None)
    assert "sdpa, not flash_attention_4: it needs a GPU" in family.choose_kernels(
        module, device="cpu", compute=torch.float32, packed=True
    )
    on_gpu(monkeypatch, HOPPER)
    line = family.choose_kernels(module, device="cuda", compute=torch.bfloat16, packed=False)
    assert line == "sdpa, not flash_attention_4: it is for packed rows"


def test_another_version_falls_back_with_a_reason(wheel: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash4.lacking(capability=HOPPER, head_dim=128) is None
    assert "heads of width 20" in str(flash4.lacking(capability=HOPPER, head_dim=20))
    monkeypatch.setattr(wheel, "_flash_attn_bwd", lambda q, k, v: None)
    flash4._functions.cache_clear()
    said = str(flash4.lacking(capability=HOPPER, head_dim=128))
    assert said.startswith("flash-attn-4 4.0.0b36 has changed")
    assert "cu_seqlens_q" in said


def test_a_wheel_that_cannot_be_imported_falls_back_with_a_reason(
    wheel: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, wheel.__name__, None)
    flash4._functions.cache_clear()
    assert "cannot be imported: ModuleNotFoundError" in str(flash4.missing())


def test_the_wheel_is_not_taken_for_flash_attention_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are folders called flash_attn; that of the wheel has no __init__.py."""
    from fullshard.hf.architecture.attention import flash_is_installed

    before = flash_is_installed()
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert flash_is_installed() == before
    (tmp_path / "flash_attn" / "__init__.py").write_text("")
    importlib.invalidate_caches()
    assert flash_is_installed()
