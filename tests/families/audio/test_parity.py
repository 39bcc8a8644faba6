"""Losses and gradient norms of whole runs equal those of a plain loop over Transformers' model and extractor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel

from tests.families.audio.small import MODELS, loaded, model_folder, plain_loop, settings, write_records
from tests.ranks import RankPool
from tests.slow import one_in
from tests.small import curve, train

CLIPS = [1, 2, 0, 1, 1, 0, 3, 1] * 2
"""Clips of each record: one, several, none."""
WITHIN = 2e-6
"""Relative: one row at a time against padded rows of two, in another order of summation."""


def made(folder: Path, architecture: str, clips: list[int] = CLIPS) -> Path:
    model_folder(folder / "model", architecture)
    write_records(folder, clips)
    return folder


def losses(ranks: RankPool, folder: Path, name: str, *, world: int = 1, nodes: int = 1, **sections: Any) -> Any:
    chosen = settings(folder, name, **sections)
    return curve(ranks.run(train, chosen, world=world, nodes=nodes)[0], "loss", "grad_norm")


@pytest.mark.parametrize("architecture", MODELS)
def test_each_model_trains_as_in_a_plain_loop(ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    folder = made(tmp_path, architecture)
    np.testing.assert_allclose(losses(ranks, folder, "run"), plain_loop(folder), rtol=WITHIN)


@pytest.mark.slow
def test_gemma_trains_as_in_a_plain_loop(ranks: RankPool, tmp_path: Path) -> None:
    """188 tokens for every clip; its vision tower is a stand-in."""
    from tests.families.audio.gemma import train_gemma

    folder = made(tmp_path, "gemma3n")
    runs = {}
    for world in (1, 2):
        chosen = settings(folder, f"run{world}", data={"sequence_length": 768})
        runs[world] = curve(ranks.run(train_gemma, chosen, world=world)[0], "loss", "grad_norm")
    np.testing.assert_allclose(runs[1], plain_loop(folder), rtol=WITHIN)
    np.testing.assert_allclose(runs[2], runs[1], rtol=WITHIN)


@pytest.mark.parametrize(
    "architecture", ["qwen2_audio", *(pytest.param(m, marks=pytest.mark.slow) for m in MODELS[1:])]
)
def test_a_frozen_tower_changes_nothing_else(ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    folder = made(tmp_path, architecture)
    inside = "model.embed_tokens_extend.audio_embed."
    audio = ("model.audio_tower", f"{inside}encoder")
    found = losses(ranks, folder, "run", world=2, model={"towers": {"audio": {"freeze": True}}})
    np.testing.assert_allclose(found, plain_loop(folder, frozen=audio), rtol=WITHIN)
    both = {"audio": {"freeze": True}, "projector": {"freeze": True}}
    found = losses(ranks, folder, "both", model={"towers": both})
    frozen = (*audio, "model.multi_modal_projector", inside)
    np.testing.assert_allclose(found, plain_loop(folder, frozen=frozen), rtol=WITHIN)


@pytest.mark.parametrize("architecture", ["phi4_multimodal", pytest.param("voxtral", marks=pytest.mark.slow)])
def test_a_tower_has_its_own_learning_rate(ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    """Also where the language model holds the tower."""
    folder = made(tmp_path, architecture)
    inside = "model.embed_tokens_extend.audio_embed."
    audio, projector = (
        (f"{inside}encoder", inside)
        if architecture == "phi4_multimodal"
        else ("model.audio_tower", "model.multi_modal_projector")
    )
    rates = {audio: 1e-4, projector: 5e-3, "model": 2e-3, "lm_head": 2e-3}
    towers = {"projector": {"lr": 5e-3}, "audio": {"lr": 1e-4, "recompute": "full"}, "language": {"lr": 2e-3}}
    found = losses(ranks, folder, "run", world=2, model={"towers": towers})
    np.testing.assert_allclose(found, plain_loop(folder, rates=rates), rtol=WITHIN)


@pytest.mark.parametrize(
    "architecture", ["phi4_multimodal", *(pytest.param(m, marks=pytest.mark.slow) for m in MODELS[:2])]
)
def test_adapters_train_as_pefts(ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    """The loop trains the same adapters, which peft loads; only the language model is adapted."""
    folder = made(tmp_path, architecture)
    model = {"lora": {"preset": "paper_r64", "r": 4, "dropout": 0.0}}
    runs = {world: losses(ranks, folder, f"run{world}", world=world, model=model) for world in (1, 2)}
    np.testing.assert_allclose(runs[1], runs[2], rtol=WITHIN)
    begun = losses(ranks, folder, "begun", model=model, optimizer={"lr": 1e-30, "weight_decay": 0.0})
    base = loaded(folder / "model")
    adapted = PeftModel.from_pretrained(base, folder / "runs" / "begun" / "model", is_trainable=True)
    assert adapted.peft_config["default"].lora_alpha == 128
    names = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert not any("audio" in name or "projector" in name for name in names)
    found = plain_loop(folder, model=adapted)
    np.testing.assert_allclose(found[0], begun[0], rtol=WITHIN)
    np.testing.assert_allclose(found[0], runs[1][0], rtol=WITHIN)
    # Adam moves each number by its sign at first, so rounding of gradients that are nearly zero shows a little more.
    np.testing.assert_allclose(found[1], runs[1][1], rtol=1e-4)


def test_clips_of_different_lengths_share_a_batch(ranks: RankPool, tmp_path: Path) -> None:
    """The loop has one clip at a time, so nothing is padded there. With larger weights the tower's frames
    differ, and Transformers' own mask would change them by some 4 %."""
    folder = made(tmp_path, "phi4_multimodal")
    write_records(folder, [1, 1, 0, 1] * 4, seconds=(0.5, 0.655))  # whole numbers of the 80 ms that become one token
    model = loaded(folder / "model")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "audio_embed.encoder" in name and parameter.dim() > 1:
                parameter.mul_(8)
    model.save_pretrained(folder / "model")
    found = losses(ranks, folder, "run", data={"balance": "none"})
    np.testing.assert_allclose(found, plain_loop(folder), rtol=WITHIN)


PATTERNS = {
    "one of four ranks": [0, 0, 0, 1] + [0] * 12,
    "only the last micro-batch of the second step": [0] * 14 + [1, 0],
    "only the first micro-batch": [1] + [0] * 15,
    "no clip at all": [0] * 16,
    "mixed": CLIPS,
}


@pytest.mark.parametrize("strategy", one_in(3, ["full", "hybrid", "grad_op"]))
@pytest.mark.parametrize("pattern", one_in(3, PATTERNS))
def test_ranks_without_audio_wait_for_none(ranks: RankPool, tmp_path: Path, pattern: str, strategy: str) -> None:
    """Any pattern of clips over ranks and micro-batches finishes, with the numbers of one process; in training and in
    evaluation."""
    folder = made(tmp_path, "qwen2_audio", PATTERNS[pattern])
    nodes = 2 if strategy == "hybrid" else 1
    evaluate = {"every_steps": 2, "every_epochs": None, "parts": ["loss"]}
    sections = {"data": {"validation": str(folder / "chats.jsonl")}, "evaluate": evaluate}
    chosen = settings(folder, "four", batch={"per_device": 1}, sharding={"strategy": strategy}, **sections)
    records = ranks.run(train, chosen, world=4, nodes=nodes)[0]
    np.testing.assert_allclose(curve(records, "loss", "grad_norm"), plain_loop(folder), rtol=WITHIN)
    alone = ranks.run(train, settings(folder, "one", **sections), world=1)[0]
    measured = [[r["loss"] for r in each if r["kind"] == "validation"] for each in (records, alone)]
    assert measured[0]
    np.testing.assert_allclose(measured[0], measured[1], rtol=WITHIN)


def test_an_interrupted_run_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    """Bitwise on as many ranks, and within rounding on more."""
    folder = made(tmp_path, "voxtral")
    straight = losses(ranks, folder, "straight", world=2, duration={"steps": 4})
    losses(ranks, folder, "stopped", world=2, checkpoint={"every_steps": 2, "every_epochs": None})
    again = losses(ranks, folder, "stopped", world=2, duration={"steps": 4})
    assert again == straight
    grown = losses(ranks, folder, "grown", world=4, duration={"steps": 4}, batch={"per_device": 1})
    np.testing.assert_allclose(grown, straight, rtol=WITHIN)
