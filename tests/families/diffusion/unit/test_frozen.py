"""Latents and states of texts, made once: as diffusers and Transformers make them by hand; kept by the content of the
models; and every error that names its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullshard.config.part import decode
from fullshard.contracts.data import Encoder
from fullshard.data.loader import Loader
from fullshard.data.prepare import Prepared, prepare
from fullshard.data.sources.files import Files
from fullshard.errors import CheckpointError, DataError, RecipeError
from fullshard.families.diffusion.encoders.image import Images
from fullshard.families.diffusion.image_samples import ImageCollator
from tests.families.diffusion.parts import clip_folder, t5_folder, tokenizer_folder, vae_folder
from tests.near import assert_near

TEXTS = ["a small zero", "one", "nine eight seven six five four three"]
PIXELS = np.random.default_rng(0).integers(0, 256, (3, 8, 8), dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts")
    vae_folder(path / "pipeline" / "vae")
    clip_folder(path / "pipeline" / "text_encoder_2", tokenizer=path / "pipeline" / "tokenizer_2")
    t5_folder(path / "t5")
    return path


def encoder(**settings: Any) -> Any:
    return decode(Encoder, {"kind": "image", **settings}, where="data.encode")


def rows(**changes: Any) -> list[dict[str, Any]]:
    found = zip(PIXELS.tolist(), TEXTS, strict=True)
    return [{"image": image, "text": text, "label": 1, **changes} for image, text in found]


def prepared(records: list[dict[str, Any]], cache: Path, chosen: Images, **settings: Any) -> Prepared:
    path = cache / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    rest: dict[str, Any] = {"validation": None, "length": 64, "pack": False, "holdout": 0.0, "seed": 0, **settings}
    files = Files(path=str(path))
    return prepare(train=files.open(), encode=chosen, processor=None, cache=cache / "c", say=lambda line: None, **rest)


def batch_of(data: Prepared) -> dict[str, Any]:
    (batch,) = Loader(data.train, data.collator, per_device=len(data.train)).once()
    return batch


def by_hand(path: Path, images: np.ndarray) -> torch.Tensor:
    from diffusers import AutoencoderKL

    vae: Any = AutoencoderKL.from_pretrained(path)
    with torch.no_grad():
        mode = vae.encode(torch.tensor(images, dtype=torch.float32) / 127.5 - 1).latent_dist.mode()
    return (mode - vae.config.shift_factor) * vae.config.scaling_factor


# --- latents


def test_latents_are_those_of_diffusers(folder: Path, tmp_path: Path) -> None:
    data = prepared(rows(), tmp_path, encoder(vae=str(folder / "pipeline")))
    assert "latents: 2 x 4 x 4, by data.encode.vae" in data.report
    expected = by_hand(folder / "pipeline" / "vae", PIXELS[:, None])
    assert_near(batch_of(data)["images"], expected)
    assert data.encoder._vae is None, "freed when all is encoded"  # type: ignore[attr-defined]


def test_grey_images_become_rgb_and_records_of_files_form_one_batch(tmp_path: Path) -> None:
    vae = vae_folder(tmp_path / "vae", in_channels=3, out_channels=3)
    data = prepared(rows(), tmp_path, encoder(vae=str(vae), mean="measure", scale="measure"))
    expected = by_hand(vae, np.repeat(PIXELS[:, None], 3, axis=1))
    found = batch_of(data)["images"]
    assert_near(found, (expected - expected.mean()) / expected.std(correction=0), within=1e-4)


def test_numbers_for_each_channel(tmp_path: Path) -> None:
    each = {"latents_mean": [1.0, -2.0], "latents_std": [0.5, 4.0], "shift_factor": None, "scaling_factor": 3.0}
    chosen = encoder(vae=str(vae_folder(tmp_path / "scaled", **each)))
    plain = encoder(vae=str(vae_folder(tmp_path / "plain", shift_factor=None, scaling_factor=1.0)))
    (found,), (latent,) = (e.open(None, length=1).encode(rows()[0]).samples for e in (chosen, plain))
    mean, deviation = np.array([1.0, -2.0])[:, None, None], np.array([0.5, 4.0])[:, None, None]
    assert_near(found["image"], (latent["image"] - mean) * 3 / deviation)


def test_latents_are_shown_as_images(folder: Path) -> None:
    from diffusers import AutoencoderKL

    chosen = encoder(vae=str(folder / "pipeline"), mean=0.5, scale=2.0)
    vae: Any = AutoencoderKL.from_pretrained(folder / "pipeline" / "vae")
    latents = torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = vae.decode((latents / 2 + 0.5) / vae.config.scaling_factor + vae.config.shift_factor).sample
    assert_near(ImageCollator(chosen).decode(latents), expected, within=1e-4)


def test_the_attention_of_older_files_is_read(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    name = "diffusion_pytorch_model.safetensors"
    stored = load_file(folder / "pipeline" / "vae" / name)
    for now, before in {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}.items():
        stored = {key.replace(f".{now}.", f".{before}."): value for key, value in stored.items()}
    assert any(".query." in key for key in stored)
    save_file(stored, tmp_path / name)
    (tmp_path / "config.json").write_text((folder / "pipeline" / "vae" / "config.json").read_text())
    (found,) = encoder(vae=str(tmp_path)).open(None, length=1).encode(rows()[0]).samples
    (expected,) = encoder(vae=str(folder / "pipeline")).open(None, length=1).encode(rows()[0]).samples
    assert np.array_equal(found["image"], expected["image"])


def test_the_cache_follows_the_weights(tmp_path: Path) -> None:
    vae, cache = tmp_path / "vae", tmp_path / "c"
    vae_folder(vae)
    first = batch_of(prepared(rows(), tmp_path, encoder(vae=str(vae))))["images"]
    stores = {path.name for path in cache.iterdir() if path.is_dir()}
    again = prepared(rows(), tmp_path, encoder(vae=str(vae)))
    was = again.encoder.identity(again.train_from.store)
    assert {path.name for path in cache.iterdir() if path.is_dir()} == stores, "the same VAE, the same cache"
    vae_folder(vae, seed=1)
    other = prepared(rows(), tmp_path, encoder(vae=str(vae)))
    assert not torch.allclose(batch_of(other)["images"], first)
    now = other.encoder.identity(other.train_from.store)
    assert [key for key in was if was[key] != now[key]] == ["content of data.encode.vae"]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"image": np.zeros((2, 4, 4)).tolist()}, "is a latent, but data.encode.vae encodes images"),
        ({"image": np.zeros((8, 9), dtype=int).tolist()}, "is 8 x 9 pixels, but the VAE needs multiples of 2"),
        ({"image": np.zeros((8, 8, 3), dtype=int).tolist()}, "has 3 channels, but the VAE takes 1"),
        ({"image": np.zeros((4, 4), dtype=int).tolist()}, "Set data.encode.size to make the images alike"),
    ],
)
def test_images_that_the_vae_cannot_encode(folder: Path, tmp_path: Path, record: dict[str, Any], words: str) -> None:
    records = [*rows(), {"label": 0, **record}]
    with pytest.raises(DataError, match=words) as caught:
        prepared(records, tmp_path, encoder(vae=str(folder / "pipeline")))
    assert "rows.jsonl:4" in str(caught.value)


def test_a_latent_with_nan_names_the_record(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    vae = vae_folder(tmp_path / "vae")
    stored = load_file(vae / "diffusion_pytorch_model.safetensors")
    save_file(
        {
            name: torch.full_like(value, torch.nan) if name == "quant_conv.bias" else value
            for name, value in stored.items()
        },
        vae / "diffusion_pytorch_model.safetensors",
    )
    with pytest.raises(DataError, match=r"rows.jsonl:1: .* becomes a latent with NaN"):
        prepared(rows(), tmp_path, encoder(vae=str(vae)))


def test_folders_that_hold_no_vae(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data.encode.vae.path: .* has no config.json, and no vae/config.json"):
        prepared(rows(), tmp_path, encoder(vae=str(tmp_path)))
    with pytest.raises(RecipeError, match=r"has the class None, and only AutoencoderKL is supported"):
        prepared(rows(), tmp_path, encoder(vae=str(folder / "t5")))
    vae = vae_folder(tmp_path / "vae")
    settings = json.loads((vae / "config.json").read_text())
    (vae / "config.json").write_text(json.dumps({**settings, "latent_channels": 4}))
    with pytest.raises(CheckpointError, match=r"does not hold the tensors of its own config.json"):
        prepared(rows(), tmp_path, encoder(vae=str(vae)))


# --- texts


def test_states_are_those_of_clip(folder: Path, tmp_path: Path) -> None:
    from transformers import CLIPTextModel

    text = {"path": str(folder / "pipeline"), "part": "text_encoder_2", "max_tokens": 8}
    data = prepared(rows(), tmp_path, encoder(text=text))
    assert "texts: at most 8 tokens, states of 12" in data.report
    assert "data: 1 sample was cut at the sequence length" in data.report
    batch = batch_of(data)
    model: Any = CLIPTextModel.from_pretrained(folder / "pipeline" / "text_encoder_2")
    ids = [[1, 4, 5, 7, 3, 0, 0, 0], [1, 8, 3, 0, 0, 0, 0, 0], [1, 16, 15, 14, 13, 12, 11, 3]]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(ids))
    assert_near(batch["text_states"], expected.last_hidden_state)
    assert_near(batch["text_pooled"], expected.pooler_output)
    assert batch["text_mask"].all(), "what fills a text up counts as text, as in Stable Diffusion"
    assert batch["images"].shape == (3, 1, 8, 8)


def test_states_are_those_of_t5_without_padding(folder: Path, tmp_path: Path) -> None:
    from transformers import T5EncoderModel

    clip = {"path": str(folder / "pipeline" / "text_encoder_2"), "max_tokens": 10}
    data = prepared(
        rows(), tmp_path, encoder(text=[clip, {"path": str(folder / "t5"), "max_tokens": 12, "padded": False}])
    )
    batch = batch_of(data)
    model: Any = T5EncoderModel.from_pretrained(folder / "t5")
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[1, 4, 5, 7, 3]])).last_hidden_state[0]
    assert batch["text_states"].shape == (3, 12, 8)
    assert batch["text_pooled"].shape == (3, 12)  # by the first
    assert batch["text_mask"].sum(1).tolist() == [5, 3, 9]
    assert_near(batch["text_states"][0, :5], expected)
    assert not batch["text_states"][0, 5:].any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": " "}, "no text in the record, or a blank one"),
        ({"text": None, "caption": 7}, "'caption' must be a text, found 7"),
        ({"text": None}, r"Keys found: 'image', 'text' \(null\), 'label'"),
    ],
)
def test_records_without_a_text(folder: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        prepared([rows()[0], {**rows()[1], **changes}], tmp_path, encoder(text=str(folder / "t5")))
    assert "rows.jsonl:2: " in str(caught.value)


def test_columns_of_texts(folder: Path, tmp_path: Path) -> None:
    chosen = encoder(text={"path": str(folder / "t5"), "max_tokens": 12})
    data = prepared(rows(text=None, caption="nine"), tmp_path, chosen)
    assert "columns: text from caption (by the keys of the first record)" in data.report
    mapped = encoder(text={"path": str(folder / "t5"), "max_tokens": 12}, column_mapping={"text": "title"})
    other = prepared(rows(title="nine"), tmp_path, mapped)
    assert torch.equal(batch_of(data)["text_states"], batch_of(other)["text_states"])


def test_impossible_settings_of_texts(folder: Path, tmp_path: Path) -> None:
    clip = str(folder / "pipeline" / "text_encoder_2")
    with pytest.raises(RecipeError, match=r"max_tokens = 77, but CLIPTextModel has positions for 10 tokens"):
        prepared(rows(), tmp_path, encoder(text=clip))
    with pytest.raises(RecipeError, match=r"data.encode.text = \[\] names no text encoder"):
        encoder(text=[])
    with pytest.raises(RecipeError, match=r"flip out, or use objective.vae"):
        encoder(vae="x", flip=True)
    alone = tmp_path / "alone"
    t5_folder(alone)
    for file in tokenizer_folder(tmp_path / "other").iterdir():
        (alone / file.name).unlink()
    with pytest.raises(RecipeError, match=r"neither .* has a tokenizer"):
        prepared(rows(), tmp_path, encoder(text=str(alone)))
