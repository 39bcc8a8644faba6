"""What a run exports: Transformers loads model and processor, and it answers as the model of a plain loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoFeatureExtractor, AutoProcessor
from typer.testing import CliRunner

from fullshard.cli import app
from tests.families.audio.small import (
    MODELS,
    RATE,
    loaded,
    model_folder,
    plain_loop,
    processed,
    settings,
    tone,
    write_records,
)
from tests.near import assert_near
from tests.ranks import RankPool
from tests.slow import only_first
from tests.small import train


def made(folder: Path, architecture: str) -> Path:
    model_folder(folder / "model", architecture)
    write_records(folder, [1, 0, 2, 1, 1, 1, 0, 1])
    return folder


def question(folder: Path) -> dict[str, Any]:
    record = json.loads((folder / "chats.jsonl").read_text().splitlines()[2])
    inputs = processed(folder, record)
    asked = int((inputs.pop("labels")[0] != -100).nonzero()[0])
    cut = {name: value[:, :asked] for name, value in inputs.items() if name in ("input_ids", "attention_mask")}
    return {**inputs, **cut}


def answers(model: Any, asked: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = model.generate(**asked, max_new_tokens=6, do_sample=False)
    return found


@torch.no_grad()
@pytest.mark.parametrize("architecture", only_first(MODELS))
def test_the_exported_model_answers_as_that_of_a_plain_loop(ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    folder = made(tmp_path, architecture)
    reference = loaded(folder / "model")
    with torch.enable_grad():
        plain_loop(folder, steps=1, model=reference)
    ranks.run(train, settings(folder, "run", duration={"steps": 1}), world=2)
    exported, asked = loaded(folder / "runs" / "run" / "model").eval(), question(folder)
    # Adam's first step moves every weight by the learning rate, also where the gradient is all rounding.
    assert_near(exported(**asked).logits, reference.eval()(**asked).logits, 2e-3)
    assert torch.equal(answers(exported, asked), answers(reference, asked))
    before, after = (AutoFeatureExtractor.from_pretrained(folder / name) for name in ("model", "runs/run/model"))
    assert before.to_dict() == after.to_dict()
    if architecture == "qwen2_audio":
        text, clip = "User: <|AUDIO|>one", tone(1)
        processors = (AutoProcessor.from_pretrained(folder / name) for name in ("model", "runs/run/model"))
        one, other = (p(text=[text], audio=[clip], sampling_rate=RATE, return_tensors="pt") for p in processors)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@torch.no_grad()
@pytest.mark.parametrize("architecture", only_first(["phi4_multimodal", "qwen2_audio", "voxtral"]))
def test_adapters_and_the_merged_model_answer_alike(ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    folder = made(tmp_path, architecture)
    run, out = folder / "runs" / "run", folder / "merged"
    ranks.run(train, settings(folder, "run", optimizer={"lr": 1e-2}, model={"lora": "paper_r64"}), world=2)
    adapted = PeftModel.from_pretrained(loaded(folder / "model"), run / "model").eval()
    assert (adapted.peft_config["default"].r, adapted.peft_config["default"].lora_alpha) == (64, 128)
    result = CliRunner().invoke(app, ["export", str(run / "last"), str(out), "--as", "merged"])
    assert result.exit_code == 0, result.output
    merged, asked = loaded(out).eval(), question(folder)
    assert_near(merged(**asked).logits, adapted(**asked).logits)
    assert torch.equal(answers(merged, asked), answers(adapted, asked))
    assert not torch.allclose(merged(**asked).logits, loaded(folder / "model").eval()(**asked).logits, rtol=1e-3)
