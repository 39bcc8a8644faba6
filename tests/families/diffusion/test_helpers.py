"""Runs with frozen models beside the denoiser: a VAE or text encoders in every step are the cache of what they make, on
any ranks; `fullshard sample` makes the pictures of the run by its texts; data that has changed is noticed at a
resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.errors import RecipeError
from fullshard.log.console import Console
from fullshard.recipes.read import read
from fullshard.setup.run_inputs import prepare_inputs
from tests.families.diffusion.parts import WORDS, clip_folder, t5_folder, vae_folder
from tests.ranks import RankPool
from tests.small import curve, train

NUMBERS = ("loss", "grad_norm")
FEATURES = "tests.families.diffusion.test_helpers.mean_and_range"
PICTURES = {"kind": "pictures", "per_class": 2, "steps": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from diffusers import DiTTransformer2DModel
    from sklearn.datasets import load_digits

    path = tmp_path_factory.mktemp("frozen")
    vae_folder(path / "pipeline" / "vae")
    clip_folder(path / "clip", layers=2)
    t5_folder(path / "t5", width=16)
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


def with_texts(folder: Path, name: str, *, live: bool, **changes: Any) -> dict[str, Any]:
    """SD3 with its two kinds of encoders."""
    text = [{"path": str(folder / kind), "max_tokens": most, "live": live} for kind, most in (("clip", 6), ("t5", 4))]
    sizes = {"joint_attention_dim": 16, "pooled_projection_dim": 12, "in_channels": 2, "out_channels": 2, **changes}
    encode = {"kind": "image", "vae": str(folder / "pipeline"), "text": text, "join": "sd3"}
    return settings(
        folder,
        name,
        model={"architecture": "sd3", "size": "tiny", "overrides": {"sample_size": 4, **sizes}, "path": None},
        data={"holdout": 0.1, "encode": encode},
        # So much that texts show after three steps.
        optimizer={"lr": 2e-2},
        evaluate={
            "parts": [
                {**PICTURES, "texts": 3, "guidance": 20},
                {"kind": "fid", "extractor": FEATURES, "images": 6, "steps": 2},
            ]
        },
    )


def mean_and_range(images: torch.Tensor) -> torch.Tensor:
    """Features of images, for FID."""
    flat = images.flatten(1)
    return torch.stack([flat.mean(1), flat.amax(1) - flat.amin(1)], dim=1)


def invoked(words: list[str]) -> str:
    """A command on one rank of the pool."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return done.output


def test_text_encoders_in_every_step_are_the_cache_of_their_states(ranks: RankPool, folder: Path) -> None:
    found, fid = {}, {}
    for name, world in (("cached", 1), ("live", 1), ("live", 2)):
        chosen = with_texts(folder, f"texts-{name}-{world}", live=name == "live")
        rows = ranks.run(train, chosen, world=world)[0]
        found[name, world] = curve(rows, *NUMBERS)
        (fid[name, world],) = (row["fid"] for row in rows if "fid" in row)
    for key, other in found.items():
        np.testing.assert_allclose(other, found["cached", 1], rtol=1e-5)
        assert fid[key] == pytest.approx(fid["cached", 1], rel=1e-3)
    first = picture(folder, "texts-cached-1")
    assert first.shape == (8 * (3 * 9 - 1), 8 * (2 * 9 - 1), 3)
    for name in ("live-1", "live-2"):
        assert abs(picture(folder, f"texts-{name}") - first).max() <= 1

    held_out = prepare_inputs(read(chosen).recipe, world_size=1, console=Console(silent=True)).data.validation_from
    assert held_out is not None
    texts = tuple(held_out.records[int(index)]["text"] for index in held_out.chosen[:3])
    run, grid = str(folder / "runs" / "texts-cached-1"), folder / "sampled.png"
    (folder / "texts.txt").write_text("\n".join([*texts[1:], ""]))
    words = [
        "sample",
        run,
        "--guidance",
        "20",
        "--per-class",
        "2",
        "--steps",
        "2",
        "--batch-size",
        "2",
        "--grid",
        str(grid),
    ]
    said, _ = ranks.run(invoked, [*words, "--texts", texts[0], "--texts", str(folder / "texts.txt")], world=2)
    assert f"2 images of each text: {'; '.join(texts)}" in said
    with Image.open(grid) as image:
        assert abs(np.asarray(image).astype(int) - first).max() <= 1
    ranks.run(invoked, [*words, *(word for text in texts[::-1] for word in ("--texts", text))], world=1)
    with Image.open(grid) as image:
        assert abs(np.asarray(image).astype(int) - first).max() > 1, "the texts decide"
    for more, says in (
        ([], "its model is text-conditioned: give at least one text"),
        (["--classes", "1"], "has a text-conditioned model. Use --texts."),
    ):
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code == 2
        assert says in done.output


def test_texts_for_a_model_that_takes_none_are_refused(ranks: RankPool, folder: Path) -> None:
    data = {"encode": {"kind": "image", "vae": str(folder / "pipeline"), "text": {"path": str(folder / "t5")}}}
    with pytest.raises(AssertionError, match=r"data.encode.text gives texts, but DiTTransformer2DModel takes no texts"):
        ranks.run(train, settings(folder, "wrong", data=data), world=1)


def test_latents_that_changed_are_another_run(folder: Path, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32)
    for number in range(2):
        np.save(tmp_path / f"{number}.npy", values + number)
    rows = [{"path": str(tmp_path / f"{number}.npy"), "label": 0} for number in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = read(settings(folder, "npy", data={"train": str(tmp_path / "rows.jsonl")}, evaluate={"parts": []})).recipe

    def identity() -> dict[str, Any]:
        return prepare_inputs(chosen, world_size=1, console=Console(silent=True)).identity

    before = identity()
    np.save(tmp_path / "1.npy", values + 1)  # written anew, and the same
    assert identity() == before
    np.save(tmp_path / "1.npy", values + 2)
    after = identity()
    assert [key for key in before if after[key] != before[key]] == ["content of the images of data.train"]


def test_latents_without_a_vae_are_kept_and_shown_by_channel(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(2, 2, 4, 4)).astype(np.float32)
    for number in range(2):
        np.save(tmp_path / f"{number}.npy", values[number])
    rows = [{"path": str(tmp_path / f"{number}.npy"), "label": 0} for number in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(tmp_path / "rows.jsonl"), "encode": {"kind": "image", "mean": 0.5, "scale": 2.0}}
    ranks.run(train, settings(folder, "bare", data=data), world=1)
    run = folder / "runs" / "bare"
    made = np.load(run / "pictures" / "samples-3.npy")
    assert made.shape == (20, 2, 4, 4)  # ten classes, two of each
    # Of each latent its two channels side by side, from black to white by what each has least and most of.
    shown = picture(folder, "bare")[8::16, 8::16, 0]
    assert picture(folder, "bare").shape == (16 * (10 * 5 - 1), 16 * (2 * 9 - 1), 3)
    least, most = made.min((0, 2, 3)), made.max((0, 2, 3))
    first = (made[0] - least[:, None, None]) / (most - least)[:, None, None] * 255
    assert abs(shown[:4, :8] - np.concatenate(list(first), axis=1)).max() <= 1
    words = ["sample", str(run), "--per-class", "2", "--steps", "2", "--grid", str(tmp_path / "g.png")]
    said = invoked([*words, "--images", str(tmp_path / "each")])
    assert f"Wrote {tmp_path / 'g.npy'} (the latents;" in said.replace("\n", " ")
    assert "20 latents: each a row of grey channels" in said.replace("\n", " ")
    again = np.load(tmp_path / "g.npy")
    np.testing.assert_allclose(again, made, rtol=0, atol=1e-5)
    assert np.array_equal(np.load(tmp_path / "each" / "3" / "1.npy"), again[7])
    with Image.open(tmp_path / "g.png") as image:
        assert abs(np.asarray(image).astype(int) - picture(folder, "bare")).max() <= 1


def test_what_looks_at_images_refuses_latents(folder: Path) -> None:
    fid = {"kind": "fid", "extractor": FEATURES}
    data = {"holdout": 0.1, "encode": {"kind": "image", "size": 4, "channels": 1}}
    chosen = read(settings(folder, "none", objective={"kind": "ddpm"}, data=data, evaluate={"parts": [fid]})).recipe
    with pytest.raises(RecipeError, match="takes 2 channels. From scratch, write model.overrides.in_channels: 1"):
        prepare_inputs(chosen, world_size=1, console=Console(silent=True))
    np.save(folder / "latent.npy", np.zeros((2, 4, 4), dtype=np.float32))
    row = json.dumps({"path": str(folder / "latent.npy"), "label": 0})
    (folder / "latents.jsonl").write_text(f"{row}\n" * 20)
    data = {"holdout": 0.2, "train": str(folder / "latents.jsonl")}
    chosen = read(settings(folder, "none", objective={"kind": "ddpm"}, data=data, evaluate={"parts": [fid]})).recipe
    with pytest.raises(RecipeError, match=r"these are latents. Name the VAE .*data.encode.vae or objective.vae"):
        prepare_inputs(chosen, world_size=1, console=Console(silent=True))
