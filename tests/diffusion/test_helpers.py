"""Runs with frozen models beside the denoiser: a VAE that encodes in every step is the cache of its latents, on any
ranks; texts reach the model from their cache; data that has changed is noticed at a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullshard.errors import RecipeError
from fullshard.ground import lay_ground
from fullshard.log.console import Console
from fullshard.read import read
from tests.diffusion.parts import WORDS, clip_folder, t5_folder, vae_folder
from tests.ranks import RankPool
from tests.small import curve, train

NUMBERS = ("loss", "grad_norm")
PICTURES = {"kind": "pictures", "per_class": 2, "steps": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from diffusers import DiTTransformer2DModel
    from sklearn.datasets import load_digits

    path = tmp_path_factory.mktemp("frozen")
    vae_folder(path / "pipeline" / "vae")
    clip_folder(path / "clip")
    t5_folder(path / "t5")
    torch.manual_seed(0)
    shape = {"sample_size": 4, "in_channels": 2, "out_channels": 2, "patch_size": 2, "num_layers": 2}
    width = {"num_attention_heads": 2, "attention_head_dim": 16, "num_embeds_ada_norm": 10}
    DiTTransformer2DModel(**shape, **width).save_pretrained(path / "model")
    images, labels = load_digits(return_X_y=True)
    records = [
        {"image": (image.reshape(8, 8) * 15).astype(int).tolist(), "label": int(label), "text": f"a {WORDS[label + 3]}"}
        for image, label in zip(images[:40], labels[:40], strict=True)
    ]
    (path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def settings(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": name,
        "output": str(folder / "runs"),
        "model": {"kind": "diffusers", "path": str(folder / "model")},
        "objective": {"kind": "flow_matching"},
        "data": {"train": str(folder / "train.jsonl"), "holdout": 0, "cache": str(folder / "cache"), "pack": False},
        "batch": {"per_device": 3, "global": 12},
        "duration": {"steps": 3},
        "optimizer": {"lr": 1e-3},
        "schedule": {"kind": "constant"},
        "precision": "fp32",
        "topology": {"device": "cpu"},
        "evaluate": {"every_epochs": None, "parts": [PICTURES]},
        "checkpoint": {"every_steps": None, "every_epochs": None, "best": None},
        "log": {"every_steps": 1, "sinks": []},
    }
    return {
        key: {**value, **sections[key]} if isinstance(sections.get(key), dict) else sections.get(key, value)
        for key, value in base.items()
    }


def picture(folder: Path, name: str) -> np.ndarray:
    from PIL import Image

    with Image.open(folder / "runs" / name / "pictures" / "samples-3.png") as image:
        return np.asarray(image).astype(int)


def test_a_vae_in_every_step_is_the_cache_of_its_latents(ranks: RankPool, folder: Path) -> None:
    vae = str(folder / "pipeline")
    live = {"objective": {"vae": {"kind": "autoencoder", "path": vae}}}
    cached = {"data": {"encode": {"kind": "image", "vae": vae}}}
    found = {
        (name, world): curve(
            ranks.run(train, settings(folder, f"{name}-{world}", **sections), world=world)[0], *NUMBERS
        )
        for name, sections in (("live", live), ("cached", cached))
        for world in (1, 2)
    }
    for other in found.values():
        np.testing.assert_allclose(other, found["cached", 1], rtol=1e-5)
    # Digits of 8 x 8, decoded from latents of 4 x 4, a row of two for each class.
    first = picture(folder, "cached-1")
    assert first.shape == (8 * (10 * 9 - 1), 8 * (2 * 9 - 1), 3)
    assert len(np.unique(first)) > 20
    for name in ("cached-2", "live-1", "live-2"):
        assert abs(picture(folder, name) - first).max() <= 1, name


def test_texts_reach_the_model_on_any_ranks(ranks: RankPool, folder: Path) -> None:
    text = [{"path": str(folder / "clip"), "max_tokens": 6}, {"path": str(folder / "t5"), "max_tokens": 4}]
    sizes = {"joint_attention_dim": 8, "pooled_projection_dim": 12, "sample_size": 4, "in_channels": 2}
    model = {"architecture": "sd3", "size": "tiny", "overrides": {**sizes, "out_channels": 2}, "path": None}
    data = {"holdout": 0.1, "encode": {"kind": "image", "vae": str(folder / "pipeline"), "text": text}}
    found = []
    for world in (1, 2):
        shown = {"evaluate": {"parts": [{**PICTURES, "texts": 3}]}}
        chosen = settings(folder, f"texts-{world}", model=model, data=data, **shown)
        found.append(curve(ranks.run(train, chosen, world=world)[0], *NUMBERS))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
    one, two = picture(folder, "texts-1"), picture(folder, "texts-2")
    assert one.shape == (8 * (3 * 9 - 1), 8 * (2 * 9 - 1), 3)
    assert abs(one - two).max() <= 1


def test_texts_for_a_model_that_takes_none_are_refused(ranks: RankPool, folder: Path) -> None:
    data = {"encode": {"kind": "image", "vae": str(folder / "pipeline"), "text": {"path": str(folder / "t5")}}}
    with pytest.raises(AssertionError, match=r"data.encode.text gives texts, and DiTTransformer2DModel takes none"):
        ranks.run(train, settings(folder, "wrong", data=data), world=1)


def test_latents_that_changed_are_another_run(folder: Path, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32)
    for number in range(2):
        np.save(tmp_path / f"{number}.npy", values + number)
    rows = [{"path": str(tmp_path / f"{number}.npy"), "label": 0} for number in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = read(settings(folder, "npy", data={"train": str(tmp_path / "rows.jsonl")}, evaluate={"parts": []})).recipe

    def identity() -> dict[str, Any]:
        return lay_ground(chosen, world_size=1, console=Console(silent=True)).identity

    before = identity()
    np.save(tmp_path / "1.npy", values + 1)  # written anew, and the same
    assert identity() == before
    np.save(tmp_path / "1.npy", values + 2)
    after = identity()
    assert [key for key in before if after[key] != before[key]] == ["content of the images of data.train"]


def test_pictures_of_latents_need_a_vae(folder: Path) -> None:
    chosen = read(settings(folder, "none", objective={"kind": "ddpm"})).recipe
    with pytest.raises(RecipeError, match=r"latents are no images. Name the VAE .*data.encode.vae or objective.vae"):
        lay_ground(chosen, world_size=1, console=Console(silent=True))
