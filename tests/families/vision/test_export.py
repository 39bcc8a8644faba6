"""What a run exports: Transformers loads the model and its processor, and it answers as the model of a plain loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.families.vision.encoders.desktop import Desktop
from fullshard.families.vision.models.vlm import Vlm
from fullshard.multimodal.processor import assemble
from tests.families.vision.small import model_folder, plain_loop, processed, settings, write_records
from tests.families.vision.test_generate import command, stops
from tests.near import assert_near
from tests.ranks import RankPool
from tests.slow import only_first
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


TOKENS = 8


def desktop(folder: Path, name: str, **model: Any) -> dict[str, Any]:
    """A run that adds the tokens of desktop events to the model's own."""
    chosen = settings(folder, name, duration={"steps": 2}, optimizer={"lr": 1e-4}, model=model)
    chosen["data"] |= {"train": {"kind": "desktop_episodes", "episodes": 3}, "encode": {"kind": "desktop"}}
    return chosen


def generated(ranks: RankPool, target: Path, picture: Path, prompt: str) -> list[int]:
    """What our own model says, with its sharded weights."""
    words = ["generate", str(target), "--raw", "--image", str(picture), "--prompt", prompt, "--json"]
    [(code, said, told), *_] = ranks.run(command, *words, "--max-new-tokens", str(TOKENS), world=2)
    assert code == 0, told
    return json.loads(said)["tokens"]  # type: ignore[no-any-return]


@torch.no_grad()
def by_transformers(model: Any, folder: Path, picture: Path, prompt: str) -> list[int]:
    """The same with the exported model and processor in Transformers."""
    processor = plain_processor(folder)
    own = Vlm(path=str(folder.parents[2] / "model")).load_processor(folder, where="model.path")
    kinds = {"return_mm_token_type_ids": True} if "mm_token_type_ids" in processor.model_input_names else {}
    with Image.open(picture) as image:
        pictures = [[image.convert("RGB")]]
    text = own.placeholder + prompt
    inputs = processor(text=[text], images=pictures, add_special_tokens=False, return_tensors="pt", **kinds)
    ends = stops(model, processor.tokenizer)
    made = model.eval().generate(**inputs, max_new_tokens=TOKENS, do_sample=False, **ends)
    return made[0, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


def plain_processor(folder: Path) -> Any:
    """Transformers' own, without the video processor where that needs torchvision."""
    try:
        return AutoProcessor.from_pretrained(folder)
    except ImportError:
        parts = {"image_processor": AutoImageProcessor.from_pretrained(folder)}
        parts["tokenizer"] = AutoTokenizer.from_pretrained(folder)
        name = json.loads((folder / "processor_config.json").read_text())["processor_class"]
        return assemble(name, parts, {})


@pytest.mark.parametrize("architecture", only_first(["idefics3", "llava", "qwen2_5_vl", "gemma3"]))
def test_a_new_vocabulary_is_exported(ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    """The whole model, adapters and merged adapters: each has the added tokens, and says what our own model says."""
    base = model_folder(tmp_path / "model", architecture)
    Image.new("RGB", (40, 56), "green").save(tmp_path / "picture.png")
    picture, added = tmp_path / "picture.png", Desktop().added_tokens()
    prompt = "".join(added[:6])
    for name, model in (("whole", {}), ("adapted", {"lora": {"r": 4, "alpha": 8}})):
        ranks.run(train, desktop(tmp_path, name, **model), world=2)
    runs = tmp_path / "runs"
    merged = runs / "adapted" / "merged"
    result = CliRunner().invoke(app, ["export", str(runs / "adapted" / "last"), str(merged), "--as", "merged"])
    assert result.exit_code == 0, result.output
    tokenizer = AutoTokenizer.from_pretrained(runs / "adapted" / "model")
    adapted = AutoModelForImageTextToText.from_pretrained(base)
    assert adapted.get_input_embeddings().num_embeddings < len(tokenizer)
    # Adapters leave new rows as they are: the mean of the others, as Transformers makes them.
    adapted.resize_token_embeddings(len(tokenizer))
    loaded = {
        runs / "whole" / "model": AutoModelForImageTextToText.from_pretrained(runs / "whole" / "model"),
        merged: AutoModelForImageTextToText.from_pretrained(merged),
        runs / "adapted" / "model": PeftModel.from_pretrained(adapted, runs / "adapted" / "model"),
    }
    for folder, model in loaded.items():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert model.get_input_embeddings().num_embeddings == len(tokenizer)
        assert [len(tokenizer(token, add_special_tokens=False)["input_ids"]) for token in added] == [1] * len(added)
        expected = generated(ranks, folder, picture, prompt)
        assert by_transformers(model, folder, picture, prompt) == expected, folder
        assert generated(ranks, folder.parent, picture, prompt) == expected, folder
