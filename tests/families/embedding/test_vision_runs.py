"""Whole runs with images: equal losses on any ranks and caches, an interrupted run goes on, and sentence-transformers
loads what is left and encodes texts, images and both as the trained model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

from fullshard.checkpoint.reader import open_tensors
from fullshard.log.metrics import FILE, read
from tests.families.embedding import vision
from tests.near import assert_near
from tests.ranks import RankPool
from tests.small import curve, train

NUMBERS = ("loss", "grad_norm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures")
    vision.vision_folder(path / "model")
    vision.pictures(path)
    return path


def settings(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": name,
        "output": str(folder / "runs"),
        "model": {"kind": "sentence_transformer", "path": str(folder / "model")},
        "objective": {"kind": "contrastive", "loss": {"kind": "infonce", "temperature": 0.1}},
        "data": {
            "train": str(folder / "pairs.jsonl"),
            "encode": {"kind": "pairs", "image_root": str(folder / "images")},
            "sequence_length": 64,
            "holdout": 0.2,
            "cache": str(folder / "cache"),
        },
        "batch": {"per_device": 2, "global": 8},
        "duration": {"steps": 4},
        "optimizer": {"lr": 1e-3},
        "schedule": {"kind": "constant"},
        "precision": "fp32",
        "topology": {"device": "cpu"},
        "evaluate": {"every_epochs": None, "parts": [{"kind": "retrieval"}]},
        "checkpoint": {"every_steps": 2, "keep": None, "best": None},
        "log": {"every_steps": 1, "sinks": []},
    }
    return {
        key: {**value, **sections.get(key, {})} if isinstance(value, dict) else value for key, value in base.items()
    }


@pytest.fixture(scope="module")
def straight(ranks: RankPool, folder: Path) -> list[tuple[float, ...]]:
    return curve(ranks.run(train, settings(folder, "straight"), world=1)[0], *NUMBERS)


@pytest.mark.parametrize(
    ("name", "world", "sections"),
    [
        ("two", 2, {}),
        ("cached", 2, {"objective": {"cache": 3}, "batch": {"per_device": 4}}),
        ("recomputed", 2, {"sharding": {"activation_checkpointing": "full"}, "objective": {"cache": {"tokens": 64}}}),
        ("replicas", 4, {"sharding": {"strategy": "hybrid"}, "batch": {"per_device": 1}}),
    ],
)
def test_the_same_losses_on_any_ranks_and_caches(
    ranks: RankPool, folder: Path, straight: Any, name: str, world: int, sections: dict[str, Any]
) -> None:
    chosen = settings(folder, name, **sections)
    found = curve(ranks.run(train, chosen, world=world, nodes=2 if name == "replicas" else 1)[0], *NUMBERS)
    np.testing.assert_allclose(found, straight, rtol=2e-5)


def test_an_interrupted_run_continues(ranks: RankPool, folder: Path, straight: Any) -> None:
    first = settings(folder, "half", duration={"steps": 2})
    ranks.run(train, first, world=1)
    records = ranks.run(train, settings(folder, "half"), world=1)[0]
    assert curve(records, *NUMBERS) == straight


def test_sentence_transformers_encodes_as_the_trained_model(
    folder: Path, straight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel, AutoProcessor

    run = folder / "runs" / "straight"
    # Loading Transformers' class of the whole processor asks for torchvision; what it does then is its own.
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda path, **_: vision.own_processor(Path(path)))
    loaded = SentenceTransformer(str(run / "model"), device="cpu", local_files_only=True)
    saved = open_tensors(run / "last").section("model")
    model = AutoModel.from_pretrained(folder / "model")
    model.load_state_dict({name: saved.whole(name) for name in saved.names()}, strict=True)
    processor = vision.own_processor(folder / "model")
    image = Image.open(folder / "images" / "1a.png").convert("RGB")
    for given in ("a / b", image, {"image": image, "text": "both"}):
        words = given["text"] if isinstance(given, dict) else given if isinstance(given, str) else None
        content: list[dict[str, Any]] = [] if isinstance(given, str) else [{"type": "image", "image": image}]
        content += [{"type": "text", "text": words}] if words is not None else []
        messages = [{"role": "user", "content": content}]
        features = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
        with torch.no_grad():
            right = normalize(model(**features).last_hidden_state[0, -1], dim=-1)
        assert_near(loaded.encode([given])[0], right)


def test_retrieval_finds_images_too(folder: Path, straight: Any) -> None:
    records = read(folder / "runs" / "straight" / FILE)
    [last] = [record for record in records if record["kind"] == "validation"][-1:]
    assert 0 <= last["recall@1"] <= last["recall@10"] <= 1
