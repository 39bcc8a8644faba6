"""Stored weights that are cut, mangled or not numbers are found, and whole ones have ticks only."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fullshard.check import weights
from fullshard.check.findings import Finding
from fullshard.errors import CheckpointError
from tests import small

MATRIX, VECTOR = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.model_folder(tmp_path_factory.mktemp("stored") / "model")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def levels(findings: list[Finding]) -> list[tuple[str, str]]:
    assert all(f.level == "ok" or f.remedy for f in findings)
    return [(f.level, f.check) for f in findings]


def test_complete_files_have_ticks_only(whole: Path) -> None:
    findings = list(weights.look(whole))
    assert levels(findings) == [("ok", "weight files"), ("ok", "stored values")]
    number = len(load_file(whole / "model.safetensors"))
    assert findings[1].text == f"finite in a sample of {number} of {number} tensors"


def mangle_tail(raw: bytes) -> bytes:
    return raw[:-1000]


def mangle_end(raw: bytes) -> bytes:
    return raw + b"\0" * 7


def mangle_header(raw: bytes) -> bytes:
    return raw[:200]


def mangle_length(raw: bytes) -> bytes:
    return raw[:6] + b"\xff\xff" + raw[8:]


def mangle_text(raw: bytes) -> bytes:
    return raw[:8] + b"!" + raw[9:]


def mangle_all(raw: bytes) -> bytes:
    return b"abc"


def mangle_pointer(raw: bytes) -> bytes:
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4000000000\n"


@pytest.mark.parametrize(
    ("mangle", "text"),
    [
        (mangle_tail, r"truncated: [\d,]+ bytes, but its header describes [\d,]+ \(1,000 are missing\)"),
        (mangle_end, r"\(7 too many\)"),
        (mangle_header, r"its header claims [\d,]+ bytes, but the file has 200"),
        (mangle_length, r"its header claims [\d,]+ bytes, but the file has"),
        (mangle_text, r"its header of [\d,]+ bytes is not a list of tensors"),
        (mangle_all, r"3 bytes, too few for a safetensors file"),
        (mangle_pointer, r"Git LFS pointer"),
    ],
)
def test_a_damaged_file(folder: Path, mangle: Callable[[bytes], bytes], text: str) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(mangle(file.read_bytes()))
    (finding,) = weights.look(folder)
    assert levels([finding]) == [("error", "weight files")]
    assert re.search(text, finding.text)
    assert str(file) in finding.text
    # What is refused here cannot be opened for training either.
    with pytest.raises(CheckpointError):
        weights.open_folder(folder)


def test_every_broken_file_is_named(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole = small.model_folder(tmp_path / "whole")
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 3
    assert [f.level for f in weights.look(tmp_path / "parts")] == ["ok", "ok"]
    for file in files[1:3]:
        file.write_bytes(file.read_bytes()[:-1])
    findings = list(weights.look(tmp_path / "parts"))
    assert levels(findings) == [("error", "weight files")] * 2
    assert [file.name in f.text for file, f in zip(files[1:3], findings, strict=True)] == [True, True]
    files[1].unlink()
    with pytest.raises(CheckpointError, match="1 of .* weight files are missing"):
        list(weights.look(tmp_path / "parts"))


def change(folder: Path, name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = edit(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", [MATRIX, VECTOR])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_are_errors(folder: Path, name: str, value: float) -> None:
    change(folder, name, lambda tensor: torch.full_like(tensor, value))
    findings = list(weights.look(folder))
    assert levels(findings) == [("ok", "weight files"), ("error", "stored values")]
    assert f"{name} holds NaN or Inf" in findings[1].text


def test_a_matrix_of_zeros_is_suspicious_and_a_vector_of_zeros_is_not(folder: Path) -> None:
    change(folder, VECTOR, torch.zeros_like)
    assert [f.level for f in weights.look(folder)] == ["ok", "ok"]
    change(folder, MATRIX, torch.zeros_like)
    findings = list(weights.look(folder))
    assert levels(findings) == [("ok", "weight files"), ("warning", "stored values")]
    assert f"{MATRIX} holds nothing but zeros" in findings[1].text


def test_some_rows_of_zeros_are_not_suspicious(folder: Path) -> None:
    def only_one_value(tensor: torch.Tensor) -> torch.Tensor:
        tensor = torch.zeros_like(tensor)
        tensor[2, 3] = 1.0
        return tensor

    change(folder, MATRIX, only_one_value)
    assert [f.level for f in weights.look(folder)] == ["ok", "ok"]
