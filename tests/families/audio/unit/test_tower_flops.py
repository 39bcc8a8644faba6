"""The cost of clips against the matrix products that torch counts in a real pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForMultimodalLM, AutoModelForSpeechSeq2Seq

from fullshard.families.audio.models.audio_lm import AudioLM
from tests.families.audio.small import MODELS, model_folder, tone

TOWERS = ("audio", "projector")


def built(folder: Path, **settings: Any) -> tuple[AudioLM, Any, Any]:
    family = AudioLM(path=str(folder), **settings)
    processor = family.load_processor(folder, where="model.path")
    return family, processor, family.build(processor=processor)


@torch.no_grad()
def counted(folder: Path, processor: Any, names: list[str], clip: np.ndarray) -> int:
    """What torch counts in these modules of Transformers' model, whose attention is plain matrix products."""
    features = processor.features([clip])
    if not processor.clip_tokens:
        speech = AutoModelForSpeechSeq2Seq.from_pretrained(folder, attn_implementation="eager")
        with FlopCounterMode(display=False) as counter:
            speech.get_encoder()(features["input_features"])
        return int(counter.get_total_flops())
    plain = AutoModelForMultimodalLM.from_pretrained(folder, attn_implementation="eager")
    text = processor.clip_text(len(clip))
    ids = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with FlopCounterMode(display=False) as counter:
        plain(input_ids=ids, use_cache=False, **features)
    found = {name.partition(".")[2]: sum(each.values()) for name, each in counter.get_flop_counts().items()}
    return sum(found.get(name, 0) for name in names)


@pytest.mark.parametrize("name", [*MODELS, "whisper"])
def test_the_cost_of_a_clip_follows_a_counted_pass(tmp_path: Path, name: str) -> None:
    _, processor, module = built(model_folder(tmp_path / name, name))
    names = [part for kind in TOWERS for part in module.towers.get(kind, ())]
    costs = module.clip_costs()
    for seconds in (1.0, 2.0):
        expected = counted(tmp_path / name, processor, names, tone(1, seconds=seconds))
        found = sum(clip + seconds * second for clip, second in costs.values())
        assert found == pytest.approx(expected, rel=1e-6), seconds


def test_frozen_towers_cost_a_third(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "qwen2_audio", "qwen2_audio")
    family, _, module = built(folder)
    frozen, _, still = built(folder, towers={"audio": {"freeze": True}, "projector": {"freeze": True}})
    half, _, projected = built(folder, towers={"audio": {"freeze": True}})
    adapted, _, light = built(folder, lora={"r": 4}, towers={"audio": {"lora": True}})
    costs = [f.media_flops(m)["clips"] for f, m in ((family, module), (frozen, still), (half, projected))]
    tower, projector = (module.clip_costs()[kind][0] for kind in TOWERS)
    assert costs[1] == tower + projector
    assert costs[2] == tower + 3 * projector
    # The table of positions is never trained.
    assert costs[0] == pytest.approx(3 * costs[1], rel=0.05)
    assert 2 * tower < adapted.media_flops(light)["clips"] < 2.7 * tower
