"""Answers generated in an evaluation: what is asked, and the positions of new tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fullshard.families.vision.encoders.image_chat import ImageChat
from fullshard.families.vision.models.vlm import Vlm
from fullshard.families.vision.shown_answers import Shown, sheet, table
from fullshard.multimodal.answers import _extended, last_answer
from tests.families.vision.small import model_folder


@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "gemma3"])
def test_new_tokens_are_placed_as_the_processor_places_them(tmp_path: Path, architecture: str) -> None:
    """Asked for the last of two answers; the answer's own tokens, one by one, give the whole row again."""
    Image.new("RGB", (56, 112)).save(tmp_path / "one.png")
    folder = model_folder(tmp_path / "model", architecture)
    processor = Vlm(path=str(folder)).load_processor(folder, where="model.path")
    encoder = ImageChat(image_root=tmp_path).open(processor, length=256)
    said = [("user", "<image>What colour?"), ("assistant", "red"), ("user", "And?"), ("assistant", "black and blue")]
    messages = [{"role": role, "content": content} for role, content in said]
    [sample] = encoder.encode({"messages": messages, "images": ["one.png"]}).samples
    before, answer = last_answer(sample)
    assert processor.tokenizer.decode(answer, skip_special_tokens=True).strip() == "black and blue"
    assert processor.tokenizer.decode(before["input_ids"]).endswith("And?\nAssistant:")
    collator = encoder.collator(sample)  # type: ignore[arg-type]
    batch, whole = (collator.collate([each], length=None) for each in (before, sample))
    for token in answer:
        batch = _extended(batch, token, token_type=processor.text_type)
    size = batch["input_ids"].shape[1]
    for name in ("input_ids", "position_ids", "media.mrope", "media.token_type_ids", "media.pixel_values"):
        if name in whole:
            per_token = whole[name].shape[:2] == whole["input_ids"].shape
            expected = whole[name][:, :size] if per_token else whole[name]
            assert torch.equal(batch[name], expected), name
    assert ("media.mrope" in whole) == (architecture == "qwen2_5_vl")


def test_images_are_not_cut_with_the_tokens() -> None:
    """Not even one whose path has as many bytes as the row has tokens."""
    sample = {"input_ids": np.arange(6), "labels": np.array([-100, -100, 3, 4, 5, -100]), "image_data": np.arange(6)}
    before, answer = last_answer(sample)
    assert (before["input_ids"].tolist(), answer) == ([0, 1, 2], [3, 4, 5])
    assert len(before["image_data"]) == 6


def test_the_sheet_and_the_table() -> None:
    picture = Image.new("RGB", (32, 16), "blue")
    shown = [Shown([picture, picture], "What | colour? " * 20, "blue", "red"), Shown([picture], "And?", "blue", "blue")]
    pixels = np.asarray(sheet(shown)).reshape(-1, 3)
    assert (pixels == [0, 0, 255]).all(1).sum() == 3 * 160 * 80
    head, _, first, second = table(shown).splitlines()
    assert head == "|  | question | expected | answer | right |"
    assert first.count("\\|") == 20
    assert second == "| 2 | And? | blue | blue | yes |"
