"""Precision: the spellings of the field, and what a word means on a device."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from fullshard.errors import RecipeError
from fullshard.precision import avoid_broken_amx, check_word, resolve_precision
from fullshard.read import read

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
        ("no", "fp32"),
        (False, "fp32"),
        (None, "fp32"),
    ],
)
def test_every_spelling_of_the_field(spelled: Any, word: str) -> None:
    assert check_word(spelled) == word


def test_an_unknown_word_is_refused_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"precision = 'bf61'.*did you mean 'bf16'.*allowed: auto, bf16"):
        read({"model": "m", "data": {"train": "t"}, "precision": "bf61"})


@pytest.mark.parametrize(
    ("word", "compute", "scaler"),
    [("bf16", torch.bfloat16, False), ("fp16", torch.float16, True), ("fp32", torch.float32, False)],
)
def test_what_a_word_means(word: str, compute: torch.dtype, scaler: bool) -> None:
    found = resolve_precision(word, CPU)
    assert (found.word, found.compute, found.scaler) == (word, compute, scaler)
    assert found.reason == "as asked for"
    assert "storage float32" in found.describe()
    assert ("with loss scaling" in found.describe()) == scaler


def test_auto_decides_and_says_why() -> None:
    found = resolve_precision("auto", CPU)
    assert found.word == "bf16"
    assert found.describe().endswith("no scaler; auto: this device computes in bf16)")


TRY_AMX = """
import os, torch
from fullshard.precision import avoid_broken_amx
before = set(os.environ)
avoid_broken_amx()
assert set(os.environ) - before <= {"ONEDNN_MAX_CPU_ISA"}
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print(float((torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16())[0, 0]))
"""


def test_after_trying_amx_bf16_can_be_multiplied_and_no_child_is_left() -> None:
    environ = {key: value for key, value in os.environ.items() if key != "ONEDNN_MAX_CPU_ISA"}
    tried = subprocess.run([sys.executable, "-c", TRY_AMX], env=environ, capture_output=True, text=True, check=False)
    assert (tried.stdout, tried.returncode) == ("64.0\n", 0), tried.stderr


def test_a_wish_of_the_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    avoid_broken_amx()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_reading_the_word_needs_no_torch() -> None:
    code = (
        "import sys; from fullshard.precision import check_word; check_word('bf16'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
