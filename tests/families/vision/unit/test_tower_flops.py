"""The cost of the towers against the matrix products that torch counts in a real pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from fullshard.families.vision.models.vlm import Vlm
from tests.families.vision.small import model_folder


def built(folder: Path, **settings: Any) -> tuple[Vlm, Any, Any]:
    family = Vlm(path=str(folder), **settings)
    processor = family.load_processor(folder, where="model.path")
    return family, processor, family.build(processor=processor)


@pytest.mark.parametrize("name", ["llava", "smolvlm", "qwen2_5_vl"])
def test_the_cost_of_an_image_token_follows_a_counted_pass(tmp_path: Path, name: str) -> None:
    family, processor, module = built(model_folder(tmp_path / name, name))
    image = Image.new("RGB", (672, 504))
    text = processor.image_texts([image.size])[0]
    tokens = processor.tokenizer(text)["input_ids"].count(processor.image_token_id)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / name)
    with FlopCounterMode(display=False) as counter:
        plain.base_model.get_image_features(**processor.features([image]))
    counted = 3 * counter.get_total_flops() / tokens
    # The heads of a tiny model are so small that attention, which is left out, costs a good part of the pass.
    assert 0.4 * counted < family.media_flops(module)["image_tokens"] < 1.2 * counted


def test_frozen_towers_cost_a_third_and_are_no_part_of_the_cost_of_a_token(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "llava", "llava")
    family, _, module = built(folder)
    frozen, _, still = built(folder, towers={"vision": {"freeze": True}, "projector": {"freeze": True}})
    unused = sum(p.numel() for n, p in module.named_parameters() if n in family.resting(module) and not p.requires_grad)
    assert unused > 0
    trained, rest = family.media_flops(module)["image_tokens"], frozen.media_flops(still)["image_tokens"]
    # What the model never runs is frozen in both.
    assert rest == pytest.approx((trained + 4 * unused * module.patches_per_token) / 3, rel=1e-6)
    language = sum(p.numel() for n, p in module.named_parameters() if n not in family.resting(module))
    assert family.flops_per_token(module, length=0) == 6 * language == frozen.flops_per_token(still, length=0)
