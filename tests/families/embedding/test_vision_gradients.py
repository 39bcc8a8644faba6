"""Texts, images and both: one sharded step against Transformers' own model and processor in one plain process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fullshard.config.part import decode
from fullshard.contracts.objective import Objective
from fullshard.data.order import rank_slices
from tests.families.embedding import cases, vision
from tests.ranks import RankPool
from tests.slow import one_in

TEMPERATURE = 0.1
TOLERANCE = 1e-5
SAMPLES: list[list[tuple[str | None, tuple[int, int] | None]]] = [
    # query, positive, negatives: a text, the width and height of an image, or both
    [("a red wall", None), (None, (60, 40)), (None, (28, 28)), ("no", None)],
    [("what is it", (56, 56)), ("a yellow door", None)],
    [(None, (30, 90)), (None, (56, 28))],
    [("only words here", None), ("and here as well", None), ("more words", None)],
    [("so", None), ("few", None)],
]
"""Ranks have images in different chunks, and with four ranks one has none at all."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vision")
    return {kind: vision.vision_folder(folder / kind, kind=kind) for kind in ("qwen2_vl", "qwen3_vl")}


def features(folder: Path) -> list[list[dict[str, torch.Tensor]]]:
    """What Transformers' own processor makes of every text."""
    processor, draw = vision.own_processor(folder), np.random.default_rng(7)

    def made(text: str | None, size: tuple[int, int] | None) -> dict[str, torch.Tensor]:
        from PIL import Image

        content: list[dict[str, Any]] = []
        if size is not None:
            pixels = draw.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            content.append({"type": "image", "image": Image.fromarray(pixels)})
        if text is not None:
            content.append({"type": "text", "text": text})
        messages = [{"role": "user", "content": content}]
        return dict(processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt"))

    return [[made(*each) for each in sample] for sample in SAMPLES]


def reference(folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """InfoNCE over all positives and negatives, written out; every text goes through the model alone."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    rows = [[F.normalize(model(**text).last_hidden_state[0, -1], dim=-1) for text in s] for s in features(folder)]
    candidates = torch.stack([row[1] for row in rows] + [vector for row in rows for vector in row[2:]])
    scores = torch.stack([row[0] for row in rows]) @ candidates.T / TEMPERATURE
    loss = F.cross_entropy(scores, torch.arange(len(rows)))
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def batches(found: list[list[dict[str, Any]]], rank: int, world: int) -> list[dict[str, Any]]:
    """Micro-batches of two samples in the loader's form."""
    per_device, made = {1: 5, 2: 2, 4: 1}[world], []
    for places in rank_slices(np.arange(len(found)), per_device=per_device, rank=rank, world=world):
        chosen = [found[index] if index >= 0 else [{"input_ids": torch.tensor([[9]])}] * 2 for index in places]
        texts = [text for sample in chosen for text in sample]
        images = [text for text in texts if "pixel_values" in text]
        grids = [text["image_grid_thw"].numpy() for text in images]
        made.append(
            {
                "tokens": torch.cat([text["input_ids"][0] for text in texts]),
                "lengths": np.array([text["input_ids"].shape[1] for text in texts]),
                "texts": np.array([len(sample) for sample in chosen]),
                "label": torch.full((len(chosen),), torch.nan, dtype=torch.float64),
                "keys": torch.arange(len(texts)) + 1000 * rank + 100 * len(made),
                "images": np.array([int("pixel_values" in text) for text in texts]),
                "pixels": [text["pixel_values"] for text in images],
                "grids": np.concatenate(grids) if grids else np.zeros((0, 3), dtype=np.int64),
                "sample_ids": torch.tensor([int(index) for index in places]),
            }
        )
    return made


def steps(folder: Path, caches: list[Any], *, lora: bool) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """One sharded step with each cache."""
    from fullshard.dist import reduce
    from fullshard.dist.gradients import one_by_one

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mine, found, sharded = batches(features(folder), rank, world), [], None
    for cache in caches:
        loss = {"kind": "infonce", "temperature": TEMPERATURE}
        settings = {"kind": "contrastive", "loss": loss, "cache": cache}
        objective: Any = decode(Objective, settings, where="objective")
        model = {"kind": "sentence_transformer", "path": str(folder), "lora": 4 if lora else None}
        if sharded is None:
            sharded, _ = cases.build(model, objective, packed=True)
        total = torch.tensor(float(len(SAMPLES)))
        terms = objective.backward(sharded, one_by_one(sharded, mine), total, {}, lambda value: value)
        value = float(reduce.sum_over_ranks(terms[0].loss_sum.clone()) / total)
        found.append((value, cases.gradients(sharded)))
    return found


CASES = [
    ("qwen2_vl", 1, [None, 1, 3, 64]),
    ("qwen2_vl", 2, [None, 2, {"tokens": 40}]),
    ("qwen2_vl", 4, [None, 1]),
    ("qwen3_vl", 2, [None, 2]),
]


@pytest.mark.parametrize(("kind", "world", "caches"), one_in(3, CASES))
def test_texts_and_images_have_the_gradients_of_one_plain_process(
    ranks: RankPool, folders: dict[str, Path], kind: str, world: int, caches: list[Any]
) -> None:
    folder = folders[kind]
    right, gradients = reference(folder)
    assert any(name.startswith("visual.") for name in gradients)
    for per_rank in zip(*ranks.run(steps, folder, caches, lora=False, world=world), strict=True):
        for value, found in per_rank:
            assert value == pytest.approx(right, rel=TOLERANCE)
            assert found.keys() == gradients.keys()
            scale = max(float(gradient.abs().max()) for gradient in gradients.values())
            apart = {name: float((found[name] - gradients[name]).abs().max()) / scale for name in gradients}
            assert max(apart.values()) < TOLERANCE, max(apart, key=apart.get)  # type: ignore[arg-type]


def test_adapters_on_both_halves_are_the_same_on_any_number_of_ranks(ranks: RankPool, folders: dict[str, Path]) -> None:
    folder = folders["qwen2_vl"]
    [(right, gradients)] = ranks.run(steps, folder, [None], lora=True, world=1)[0]
    assert {name.split(".")[0] for name in gradients if "lora_A" in name} == {"visual", "language_model"}
    for value, found in ranks.run(steps, folder, [None, 2], lora=True, world=2)[0]:
        assert value == pytest.approx(right, rel=TOLERANCE)
        scale = max(float(gradient.abs().max()) for gradient in gradients.values())
        assert max(float((found[name] - gradients[name]).abs().max()) for name in gradients) / scale < TOLERANCE
