"""Losses and gradient norms of whole runs equal those of a plain loop over Transformers' model and processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from transformers import AutoModelForImageTextToText

from tests.families.vision.small import MODELS, model_folder, plain_loop, settings, write_records
from tests.ranks import RankPool
from tests.slow import one_in, only_first
from tests.small import curve, train

IMAGES = [1, 2, 0, 1, 1, 0, 3, 1] * 2
"""Images of each record: one, several, none."""
WITHIN = 2e-6
"""Relative: one row at a time against padded rows of two, in another order of summation."""
VISION = ("model.visual.blocks", "model.visual.patch_embed", "model.visual.pos_embed", "model.vision_tower")
PROJECTOR = ("model.visual.merger", "model.visual.deepstack", "model.multi_modal_projector")


def made(folder: Path, architecture: str, images: list[int] = IMAGES) -> Path:
    model_folder(folder / "model", architecture)
    # PaliGemma's processor needs an image.
    write_records(folder, [max(1, count) for count in images] if "paligemma" in architecture else images)
    return folder


def assert_equal(found: Any, expected: Any, architecture: str = "") -> None:
    """Losses and gradient norms of each step."""
    # On a CPU torch's own norm of a gradient with PaliGemma's 1,152 extra tokens is off by 1e-5, and two halves of it
    # are not.
    norms = 2e-5 if "paligemma" in architecture else WITHIN
    for column, within in enumerate((WITHIN, norms)):
        np.testing.assert_allclose(np.array(found)[:, column], np.array(expected)[:, column], rtol=within)


def losses(ranks: RankPool, folder: Path, name: str, *, world: int = 1, nodes: int = 1, **sections: Any) -> Any:
    chosen = settings(folder, name, **{"duration": {"steps": 2}, **sections})
    return curve(ranks.run(train, chosen, world=world, nodes=nodes)[0], "loss", "grad_norm")


@pytest.mark.parametrize("architecture", one_in(3, MODELS))
def test_each_model_trains_as_in_a_plain_loop(ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    folder = made(tmp_path, architecture)
    assert_equal(losses(ranks, folder, "run"), plain_loop(folder, steps=2), architecture)


@pytest.mark.parametrize("architecture", only_first(["qwen3_vl", "llava", "paligemma"]))
def test_a_frozen_tower_changes_nothing_else(ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    folder = made(tmp_path, architecture)
    found = losses(ranks, folder, "run", world=2, model={"towers": {"vision": {"freeze": True}}})
    assert_equal(found, plain_loop(folder, steps=2, frozen=VISION), architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_vl", "llava", "paligemma2"])
def test_a_frozen_projector_is_frozen_as_well(ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    folder = made(tmp_path, architecture)
    both = {"vision": {"freeze": True}, "projector": {"freeze": True}}
    found = losses(ranks, folder, "run", model={"towers": both})
    assert_equal(found, plain_loop(folder, steps=2, frozen=(*VISION, *PROJECTOR)), architecture)


@pytest.mark.parametrize(("architecture", "world"), only_first([("smolvlm", 1), ("smolvlm", 2), ("paligemma", 2)]))
def test_a_tower_has_its_own_learning_rate_and_recomputation(
    ranks: RankPool, tmp_path: Path, architecture: str, world: int
) -> None:
    folder = made(tmp_path, architecture)
    projector, vision = (
        ("model.connector", "model.vision_model")
        if architecture == "smolvlm"
        else ("model.multi_modal_projector", "model.vision_tower")
    )
    towers = {"projector": {"lr": 5e-3}, "vision": {"lr": 1e-4, "recompute": "full"}}
    found = losses(ranks, folder, "run", world=world, model={"towers": towers})
    expected = plain_loop(folder, steps=2, rates={projector: 5e-3, vision: 1e-4})
    assert_equal(found, expected, architecture)


@pytest.mark.parametrize("architecture", only_first(["paligemma", "qwen2_5_vl", "gemma3"]))
def test_adapters_train_as_in_a_plain_loop_over_pefts(ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    """Only the language model is adapted, unless a tower asks for it."""
    folder = made(tmp_path, architecture)
    targets = ["q_proj", "v_proj", *(["qkv"] if "qwen" in architecture else [])]
    model = {"lora": {"r": 4, "alpha": 8, "targets": targets}, "towers": {"vision": {"lora": True}}}
    # A step that moves next to nothing exports the adapters that every run starts with.
    losses(ranks, folder, "start", model=model, duration={"steps": 1}, optimizer={"lr": 1e-12})
    found = losses(ranks, folder, "run", world=2, model=model)
    base = AutoModelForImageTextToText.from_pretrained(folder / "model")
    reference = PeftModel.from_pretrained(base, folder / "runs" / "start" / "model", is_trainable=True)
    for name, parameter in reference.named_parameters():
        if "lora_B" in name:
            torch.nn.init.zeros_(parameter)  # as in every run's first step
    assert_equal(found, plain_loop(folder, steps=2, model=reference), architecture)
    names = list(get_peft_model_state_dict(reference))
    assert any("visual" in name or "vision_tower" in name for name in names)
    assert any("language_model" in name for name in names)
    assert not any("merger" in name or "projector" in name for name in names)


PATTERNS = {
    "one of four ranks": [0, 0, 0, 1] + [0] * 12,
    "only the last micro-batch of the second step": [0] * 14 + [1, 0],
    "only the first micro-batch": [1] + [0] * 15,
    "no image at all": [0] * 16,
    "mixed": IMAGES,
}


CASES = [(pattern, strategy) for strategy in ("full", "hybrid", "grad_op") for pattern in PATTERNS]


@pytest.mark.parametrize(("pattern", "strategy"), only_first(CASES))
def test_ranks_without_images_wait_for_none(ranks: RankPool, tmp_path: Path, pattern: str, strategy: str) -> None:
    """Any pattern of images over ranks and micro-batches finishes, with the numbers of one process."""
    folder = made(tmp_path, "smolvlm", PATTERNS[pattern])
    expected = plain_loop(folder, steps=2)
    nodes = 2 if strategy == "hybrid" else 1
    found = losses(
        ranks, folder, "four", world=4, nodes=nodes, batch={"per_device": 1}, sharding={"strategy": strategy}
    )
    assert_equal(found, expected)


@pytest.mark.slow
def test_an_interrupted_run_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    """Bitwise on as many ranks, and within rounding on more; also in a balanced order."""
    folder = made(tmp_path, "gemma3")
    order = {"data": {"balance": "steps", "shuffle": True}}
    straight = losses(ranks, folder, "straight", world=2, duration={"steps": 4}, **order)
    losses(ranks, folder, "stopped", world=2, checkpoint={"every_steps": 2, "every_epochs": None}, **order)
    again = losses(ranks, folder, "stopped", world=2, duration={"steps": 4}, **order)
    assert again == straight
    losses(ranks, folder, "grown", world=2, checkpoint={"every_steps": 2, "every_epochs": None}, **order)
    grown = losses(ranks, folder, "grown", world=4, duration={"steps": 4}, batch={"per_device": 1}, **order)
    assert_equal(grown, straight)
