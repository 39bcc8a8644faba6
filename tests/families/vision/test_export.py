"""What a run exports: Transformers loads the model and its processor, and it answers as the model of a plain loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor
from typer.testing import CliRunner

from fullshard.cli import app
from tests.families.vision.small import model_folder, plain_loop, processed, settings, write_records
from tests.near import assert_near
from tests.ranks import RankPool
from tests.small import train


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model_folder(tmp_path / "model", "llava")
    write_records(tmp_path, [1, 0, 2, 1, 1, 1, 0, 1])
    return tmp_path


def question(folder: Path) -> dict[str, torch.Tensor]:
    record = json.loads((folder / "chats.jsonl").read_text().splitlines()[2])
    inputs = processed(folder, record)
    asked = int((inputs.pop("labels")[0] != -100).nonzero()[0])
    cut = {name: value[:, :asked] for name, value in inputs.items() if name in ("input_ids", "attention_mask")}
    return {**inputs, **cut}


@torch.no_grad()
def test_the_exported_model_answers_as_that_of_a_plain_loop(ranks: RankPool, folder: Path) -> None:
    reference = AutoModelForImageTextToText.from_pretrained(folder / "model")
    with torch.enable_grad():
        plain_loop(folder, steps=1, model=reference)
    ranks.run(train, settings(folder, "run", duration={"steps": 1}), world=2)
    exported = AutoModelForImageTextToText.from_pretrained(folder / "runs" / "run" / "model").eval()
    asked = question(folder)
    # Adam's first step moves every weight by the learning rate, also where the gradient is all rounding.
    assert_near(exported(**asked).logits, reference.eval()(**asked).logits, 2e-3)
    one, other = (m.generate(**asked, max_new_tokens=6, do_sample=False) for m in (exported, reference))
    assert torch.equal(one, other)


def test_the_exported_processor_is_that_of_the_model(ranks: RankPool, folder: Path) -> None:
    ranks.run(train, settings(folder, "run", duration={"steps": 1}), world=1)
    before, after = (AutoProcessor.from_pretrained(folder / name) for name in ("model", "runs/run/model"))
    images = [torch.rand(3, 40, 24, generator=torch.Generator().manual_seed(0))]
    one, other = (p(text=["User: <image>red"], images=images, return_tensors="pt") for p in (before, after))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@torch.no_grad()
def test_adapters_and_the_merged_model_answer_alike(ranks: RankPool, folder: Path) -> None:
    lora = {"r": 4, "alpha": 8}
    run = folder / "runs" / "run"
    ranks.run(train, settings(folder, "run", duration={"steps": 2}, model={"lora": lora}), world=2)
    base = AutoModelForImageTextToText.from_pretrained(folder / "model")
    adapted = PeftModel.from_pretrained(base, run / "model").eval()
    out = folder / "merged"
    result = CliRunner().invoke(app, ["export", str(run / "last"), str(out), "--as", "merged"])
    assert result.exit_code == 0, result.output
    merged = AutoModelForImageTextToText.from_pretrained(out).eval()
    asked = question(folder)
    assert_near(merged(**asked).logits, adapted(**asked).logits)
