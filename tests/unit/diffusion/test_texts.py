"""Text encoders: joined as diffusers' pipelines join them, whole or by rows of what is stored, and settings that do not
go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullshard.data.base import Encoder
from fullshard.data.encode.image import Images
from fullshard.diffusion.latents import Latents
from fullshard.diffusion.text_model import TextWeights, empty
from fullshard.diffusion.texts import NO_TOKEN, Texts, TextStack
from fullshard.errors import RecipeError
from fullshard.models.text_encoder import TextEncoder
from fullshard.part import decode
from tests.diffusion.parts import clip_folder, t5_folder, tokenizer_folder, vae_folder
from tests.near import assert_near

TEXTS = ["a small zero", "nine eight seven six five four three"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoders")
    clip_folder(path / "clip", layers=2, projected=6)
    clip_folder(path / "clip_2", layers=3, projected=10, seed=1)
    clip_folder(path / "plain", layers=2)
    t5_folder(path / "t5", width=32)
    return path


def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, model_max_length=8)


def states(texts: list[Texts], join: Any) -> tuple[torch.Tensor, torch.Tensor]:
    stack = TextStack(texts, join)
    stack.check()
    found = list(stack.states(TEXTS))
    assert all(len(state.states) == stack.length for state in found)
    pooled = [state.pooled for state in found if state.pooled is not None]
    return torch.from_numpy(np.stack([s.states for s in found])), torch.from_numpy(np.stack(pooled))


def test_sd3_joins_as_its_pipeline_does(folder: Path) -> None:
    from diffusers import StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection, T5EncoderModel

    clip = [CLIPTextModelWithProjection.from_pretrained(folder / name).eval() for name in ("clip", "clip_2")]
    t5 = T5EncoderModel.from_pretrained(folder / "t5").eval()
    tokenizers = [tokenizer(folder / name) for name in ("clip", "clip_2", "t5")]
    parts = zip(("text_encoder", "text_encoder_2", "text_encoder_3"), (*clip, t5), strict=True)
    named = zip(("tokenizer", "tokenizer_2", "tokenizer_3"), tokenizers, strict=True)
    pipeline = StableDiffusion3Pipeline(transformer=None, scheduler=None, vae=None, **dict(parts), **dict(named))
    with torch.no_grad():
        expected = pipeline.encode_prompt(TEXTS, None, None, do_classifier_free_guidance=False, max_sequence_length=5)
    chosen = [Texts(path=str(folder / name), max_tokens=8) for name in ("clip", "clip_2")]
    found = states([*chosen, Texts(path=str(folder / "t5"), max_tokens=5, padded=True)], "sd3")
    assert found[0].shape == (2, 13, 32)
    assert_near(found[0], expected[0])
    assert_near(found[1], expected[2])


def test_sdxl_joins_as_its_pipeline_does(folder: Path) -> None:
    from diffusers import StableDiffusionXLPipeline
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    pipeline = StableDiffusionXLPipeline(
        vae=None,
        unet=None,
        scheduler=None,
        text_encoder=CLIPTextModel.from_pretrained(folder / "plain").eval(),
        text_encoder_2=CLIPTextModelWithProjection.from_pretrained(folder / "clip_2").eval(),
        tokenizer=tokenizer(folder / "plain"),
        tokenizer_2=tokenizer(folder / "clip_2"),
        add_watermarker=False,
    )
    with torch.no_grad():
        expected = pipeline.encode_prompt(TEXTS, do_classifier_free_guidance=False)
    found = states([Texts(path=str(folder / name), max_tokens=8) for name in ("plain", "clip_2")], "sdxl")
    assert_near(found[0], expected[0])
    assert_near(found[1], expected[2])


def test_a_model_that_also_looks_at_images_or_writes_is_read_without_that(tmp_path: Path) -> None:
    from transformers import CLIPConfig, CLIPModel, T5Config, T5ForConditionalGeneration

    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**small, "image_size": 8, "patch_size": 4}
    CLIPModel(CLIPConfig(text_config={**small, "vocab_size": 20}, vision_config=vision)).save_pretrained(
        tmp_path / "clip"
    )
    t5 = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=20, decoder_start_token_id=0)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    for name in ("clip", "t5"):
        tokenizer_folder(tmp_path / name)
        encoder = Texts(path=str(tmp_path / name), max_tokens=6)
        whole = encoder.open(early=False, join="flux")
        module = empty(tmp_path / name)
        weights = TextWeights(tmp_path / name, module)
        values = dict(whole.state_dict())
        assert set(values) == set(module.state_dict()) == weights.names()
        for key, value in values.items():
            assert torch.equal(weights.read(key, 0, len(value)), value), key


def test_filling_counts_as_text_or_not(folder: Path) -> None:
    tokens = torch.tensor([[1, 4, 5, 3, NO_TOKEN, NO_TOKEN]])
    for padded in (True, False):
        family = TextEncoder(encoder=Texts(path=str(folder / "t5"), max_tokens=6, padded=padded))
        module: Any = family.encoder.open(early=False, join="flux")
        with torch.no_grad():
            found, alone = module.encode_texts(tokens), module(input_ids=tokens[:, :4]).last_hidden_state
        assert found["mask"].sum() == (6 if padded else 4)
        assert bool(found["states"][:, 4:].any()) == padded
        assert torch.allclose(found["states"][:, :4], alone, atol=1e-5) != padded


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"text": [{"path": "a", "live": True}, {"path": "b"}]}, "live is true for some encoders and false for others"),
        ({"text": "a", "join": "sd3"}, "sd3 needs two encoders or more"),
        ({"text": [{"path": "a", "padded": False}, "b"], "join": "sd3"}, "side by side: give them one max_tokens"),
        ({"text": [{"path": "a", "max_tokens": 8}, "b"], "join": "sdxl"}, "side by side: give them one max_tokens"),
        ({"join": "sdxl"}, "join = sdxl is for text encoders: name them in data.encode.text"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        decode(Encoder, {"kind": "image", **settings}, where="data.encode")


def test_a_tokenizer_of_another_encoder(tmp_path: Path) -> None:
    other = tokenizer(clip_folder(tmp_path / "clip"))
    other.add_tokens(["one", "more"])
    other.save_pretrained(tmp_path / "clip")
    family = TextEncoder(encoder=Texts(path=str(tmp_path / "clip"), max_tokens=6))
    words = rf"has {len(other)} tokens, and the embedding of CLIPTextModel has 17 rows"
    with pytest.raises(RecipeError, match=words):
        family.build(processor=None)


def test_the_widest_comes_last(folder: Path) -> None:
    chosen = [Texts(path=str(folder / name), max_tokens=8) for name in ("clip", "clip_2", "plain")]
    with pytest.raises(RecipeError, match=r"states of 24 are filled up to .* which have 12. Name the widest, T5, last"):
        list(TextStack(chosen, "sd3").states(TEXTS))


def test_tokens_of_all_encoders_lie_side_by_side(folder: Path) -> None:
    text = [{"path": str(folder / name), "max_tokens": 5, "live": True} for name in ("clip", "t5")]
    encoder = decode(Encoder, {"kind": "image", "text": text}, where="data.encode")
    assert isinstance(encoder, Images)
    records = [{"image": np.zeros((4, 4), dtype=int).tolist(), "text": text} for text in TEXTS]
    samples = [found for (found,) in encoder.encode_many(records, None, length=1)]
    assert [bool(sample["cut"].any()) for sample in samples] == [False, True]
    each = [[1, 4, 5, 7, 3], [1, 16, 15, 14, 3]]
    assert encoder.collate(samples, length=None)["text_tokens"].tolist() == [ids * 2 for ids in each]


def test_the_vae_that_decodes_is_opened_once_while_it_is_kept(tmp_path: Path) -> None:
    vae = Latents(path=str(vae_folder(tmp_path / "vae")))
    latents = torch.ones(1, 2, 4, 4)
    with vae.kept():
        expected = vae.decode(latents)
        vae_folder(tmp_path / "vae", seed=1)
        assert torch.equal(vae.decode(latents), expected)
    assert not torch.equal(vae.decode(latents), expected)
