"""Precision: common spellings, and what each means on a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.dist.precision import check_word, resolve_for, resolve_precision
from fullshard.errors import RecipeError, SetupError
from fullshard.kernels.amx import avoid_broken_amx
from fullshard.recipes.read import read

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("spelled", "word"),
    [
        ("auto", "auto"),
        ("bf16", "bf16"),
        ("BF16", "bf16"),
        ("bf16-mixed", "bf16"),
        ("bf16_mixed", "bf16"),
        ("torch.bfloat16", "bf16"),
        ("fp16", "fp16"),
        ("16-mixed", "fp16"),
        (16, "fp16"),
        ("float16", "fp16"),
        ("fp32", "fp32"),
        (32, "fp32"),
        ("32-true", "fp32"),
        ("none", "fp32"),
        ("no", "fp32"),
        ("bf16-pure", "bf16-pure"),
        ("bf16-true", "bf16-pure"),
        ("pure_bf16", "bf16-pure"),
        (False, "fp32"),
        (None, "fp32"),
    ],
)
def test_every_common_spelling_is_accepted(spelled: Any, word: str) -> None:
    assert check_word(spelled) == word


def test_an_unknown_word_is_refused_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"precision = 'bf61'.*did you mean 'bf16'.*allowed: auto, bf16"):
        read({"model": "m", "data": {"train": "t"}, "precision": "bf61"})


@pytest.mark.parametrize("spelled", ["fp16-pure", "16-true", "pure_fp16", "fp16-true"])
def test_fp16_weights_are_refused_with_the_reason(spelled: str) -> None:
    with pytest.raises(RecipeError, match=r"fp16 weights cannot be trained: updates vanish.*keeps fp32 weights"):
        read({"model": "m", "data": {"train": "t"}, "precision": spelled})


@pytest.mark.parametrize(
    ("word", "compute", "scaler"),
    [("bf16", torch.bfloat16, False), ("fp16", torch.float16, True), ("fp32", torch.float32, False)],
)
def test_what_a_word_means(word: str, compute: torch.dtype, scaler: bool) -> None:
    found = resolve_precision(word, CPU)
    assert (found.word, found.compute, found.scaler) == (word, compute, scaler)
    assert found.reason == "as requested"
    assert "storage float32" in found.describe()
    assert ("with loss scaling" in found.describe()) == scaler


def test_auto_decides_and_says_why() -> None:
    found = resolve_precision("auto", CPU)
    assert found.word == "bf16"
    assert found.describe().endswith("no scaler; auto: this device computes in bf16)")


def test_auto_takes_fp16_with_a_scaler_where_bf16_is_missing_and_says_so() -> None:
    for capability in ((6, 0), (7, 0), (7, 5)):
        found = resolve_for("auto", capability=capability, name="Tesla T4")
        assert (found.word, found.storage, found.compute, found.scaler) == ("fp16", torch.float32, torch.float16, True)
        assert found.describe().endswith("with loss scaling; auto: bf16 needs compute capability 8.0)")
        assert found.switched() == "precision = auto became fp16 with a loss scaler: bf16 needs compute capability 8.0."
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0)):
        found = resolve_for("auto", capability=capability)
        assert (found.word, found.scaler, found.switched()) == ("bf16", False, None)


@pytest.mark.parametrize("word", ["bf16", "bf16-pure"])
def test_an_unsupported_precision_is_an_error_not_a_silent_switch(word: str) -> None:
    said = (
        rf"precision = {word}: Tesla T4 has compute capability 7\.5, and bf16 needs 8\.0\. Use precision: fp16 or auto"
    )
    with pytest.raises(SetupError, match=said):
        resolve_for(word, capability=(7, 5), name="Tesla T4")


@pytest.mark.parametrize("word", ["fp16", "fp32"])
def test_supported_precisions_are_used_as_requested(word: str) -> None:
    found = [resolve_for(word, capability=capability) for capability in (None, (7, 5), (9, 0))]
    assert found[0] == found[1] == found[2]
    assert (found[0].word, found[0].reason, found[0].switched()) == (word, "as requested", None)


def test_bf16_pure_keeps_bf16_and_warns() -> None:
    found = resolve_precision("bf16-pure", CPU)
    assert (found.storage, found.compute, found.scaler) == (torch.bfloat16, torch.bfloat16, False)
    assert found.describe() == (
        "bf16-pure (storage bfloat16, compute bfloat16, reduce float32, no scaler; as requested)"
    )
    assert "Adam state in bf16" in str(found.warning())


def test_the_warning_about_bf16_is_true() -> None:
    """An update smaller than 1/256 of a weight is lost, and one of 1/128 is not."""
    one = torch.ones(1, dtype=torch.bfloat16)
    assert torch.equal(one + 1 / 257, one)
    assert not torch.equal(one + 1 / 128, one)


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("fpu avx512_bf16 amx_bf16 amx_tile hypervisor", "AVX512_CORE_BF16"),
        ("fpu avx512_bf16 amx_bf16 amx_tile", None),
        ("fpu avx512_bf16 hypervisor", None),
    ],
)
def test_amx_is_avoided_only_on_virtual_machines(
    flags: str, isa: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")  # restored afterwards
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: none\n")
    avoid_broken_amx(tmp_path / "cpuinfo")
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == isa
    avoid_broken_amx(tmp_path / "no such file")


def test_onednn_max_cpu_isa_of_the_user_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    (tmp_path / "cpuinfo").write_text("flags : amx_bf16 hypervisor")
    avoid_broken_amx(tmp_path / "cpuinfo")
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_checking_the_spelling_imports_no_torch() -> None:
    code = (
        "import sys; from fullshard.dist.precision import check_word as c; c('bf16'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
