"""Text encoders: joined as diffusers' pipelines join them, whole or by rows of what is stored, and settings that do not
go together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fullshard.config.part import decode
from fullshard.contracts.data import Encoder
from fullshard.errors import RecipeError
from fullshard.families.diffusion.encoders.image import Images
from fullshard.families.diffusion.image_samples import ImageCollator
from fullshard.families.diffusion.models.text_encoder import TextEncoder
from fullshard.families.diffusion.text.encoder_model import TextWeights, empty
from fullshard.families.diffusion.text.encoder_stack import NO_TOKEN, Texts, TextStack
from fullshard.families.diffusion.vae.latents import Latents
from tests.families.diffusion.denoisers import family
from tests.families.diffusion.parts import clip_folder, t5_folder, tokenizer_folder, vae_folder
from tests.near import assert_near

TEXTS = ["a small zero", "nine eight seven six five four three"]
"""The second one is cut."""
PROMPTS = [" A small Zero", TEXTS[1]]
"""PixArt reads them in lower case."""


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


def prompted(kind: str, folder: Path, **settings: Any) -> Any:
    """A pipeline of diffusers with the tiny encoders, and nothing else."""
    import diffusers
    import transformers as hf

    loaders = {"clip": hf.CLIPTextModelWithProjection, "clip_2": hf.CLIPTextModelWithProjection}
    names = {
        "StableDiffusion3Pipeline": ("clip", "clip_2", "t5"),
        "StableDiffusionXLPipeline": ("plain", "clip_2"),
        "StableDiffusionPipeline": ("plain",),
        "FluxPipeline": ("plain", "t5"),
        "PixArtAlphaPipeline": ("t5",),
    }[kind]
    given: dict[str, Any] = {"scheduler": None, "vae": None, **settings}
    for name, behind in zip(names, ("", "_2", "_3"), strict=False):
        loader = loaders.get(name, hf.T5EncoderModel if name == "t5" else hf.CLIPTextModel)
        given[f"text_encoder{behind}"] = loader.from_pretrained(folder / name).eval()
        given[f"tokenizer{behind}"] = tokenizer(folder / name)
    denoiser = "unet" if kind in ("StableDiffusionPipeline", "StableDiffusionXLPipeline") else "transformer"
    if kind == "StableDiffusionPipeline":
        given |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return getattr(diffusers, kind)(**given, **{denoiser: None})


def spoken(pipeline: Any, *, negative: str | None, most: int) -> dict[str, torch.Tensor | None]:
    """What its own encode_prompt makes of PROMPTS, and of no text."""
    kind, guided = type(pipeline).__name__, {"do_classifier_free_guidance": True, "negative_prompt": negative}
    with torch.no_grad():
        if kind == "FluxPipeline":
            told, no_text = (pipeline.encode_prompt(texts, max_sequence_length=most) for texts in (PROMPTS, [""] * 2))
            found = (told[0], no_text[0], told[1], no_text[1])
        elif kind == "PixArtAlphaPipeline":
            guided["negative_prompt"] = ""
            states, mask, none, none_mask = pipeline.encode_prompt(PROMPTS, **guided, max_sequence_length=most)
            found = (states * mask[..., None], none * none_mask[..., None], None, None)
        elif kind == "StableDiffusionPipeline":
            found = (*pipeline.encode_prompt(PROMPTS, "cpu", 1, **guided), None, None)
        elif kind == "StableDiffusionXLPipeline":
            found = pipeline.encode_prompt(PROMPTS, **guided)
        else:
            found = pipeline.encode_prompt(PROMPTS, None, None, **guided, max_sequence_length=most)
    return dict(zip(("states", "none", "pooled", "none_pooled"), found, strict=True))


@pytest.mark.parametrize(
    ("kind", "names", "join", "no_text"),
    [
        ("StableDiffusion3Pipeline", ("clip", "clip_2", "t5"), "sd3", None),
        ("FluxPipeline", ("plain", "t5"), "flux", None),
        ("PixArtAlphaPipeline", ("t5",), "flux", None),
        ("StableDiffusionPipeline", ("plain",), "flux", None),
        ("StableDiffusionXLPipeline", ("plain", "clip_2"), "sdxl", None),
        ("StableDiffusionXLPipeline", ("plain", "clip_2"), "sdxl", "encoded"),
    ],
)
@pytest.mark.parametrize("live", [False, True])
def test_texts_and_no_text_are_those_of_the_pipeline(
    folder: Path, kind: str, names: tuple[str, ...], join: Any, no_text: Any, live: bool
) -> None:
    """In the batch that training, pictures and samples are made from; `padded` and `no_text` by their defaults."""
    from fullshard.families.diffusion.captions import collate, collate_empty, empty_features, features_of
    from fullshard.families.diffusion.denoiser.batch_inputs import texts_of

    pipeline = prompted(kind, folder, **({"force_zeros_for_empty_prompt": no_text is None} if join == "sdxl" else {}))
    wanted = spoken(pipeline, negative=None, most=8)
    texts = [Texts(path=str(folder / name), max_tokens=8, live=live) for name in names]
    stack = TextStack(texts, join, no_text=no_text)
    batch = collate([features for features, _ in features_of(PROMPTS, stack)], length=stack.length)
    batch |= collate_empty(empty_features(stack), length=stack.length)
    aux = {f"text[{number}]": encoder for number, encoder in enumerate(stack._encoders)} if live else {}
    pooled = wanted["pooled"]
    width = wanted["states"].shape[-1]  # type: ignore[union-attr]
    model = SimpleNamespace(text_width=width, pooled_width=None if pooled is None else pooled.shape[-1])
    text, none = texts_of(model, batch, aux)
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(text["states"], wanted["states"], **close)
    torch.testing.assert_close(none["states"].expand_as(text["states"]), wanted["none"], **close)
    if pooled is not None:
        torch.testing.assert_close(text["pooled"], pooled, **close)
        torch.testing.assert_close(none["pooled"].expand_as(pooled), wanted["none_pooled"], **close)
    assert bool(none["states"].any()) == (join != "sdxl" or no_text == "encoded")
    # Only PixArt gets a mask of the text: two tokens of an empty one.
    assert int(none["mask"].sum()) == (2 if kind == "PixArtAlphaPipeline" else none["mask"].numel())


def test_sdxl_takes_the_empty_text_from_the_pipeline_of_its_encoders(tmp_path: Path) -> None:
    for part in ("text_encoder", "text_encoder_2"):
        clip_folder(tmp_path / part, projected=6)
    texts = [Texts(path=str(tmp_path), part=part, max_tokens=8) for part in ("text_encoder", "text_encoder_2")]
    assert TextStack(texts, "sdxl").no_text == "zeros"
    (tmp_path / "model_index.json").write_text('{"force_zeros_for_empty_prompt": false}')
    assert TextStack(texts, "sdxl").no_text == "encoded"
    assert TextStack(texts, "sdxl", no_text="zeros").no_text == "zeros"
    assert TextStack(texts, "flux").no_text == "encoded"


def test_a_model_without_a_text_mask_gets_padded_texts(folder: Path) -> None:
    t5 = {"path": str(folder / "t5"), "max_tokens": 8}

    def refused(text: Any, name: str) -> str:
        encoder = decode(Encoder, {"kind": "image", "text": text}, where="data.encode")
        with pytest.raises(RecipeError) as caught:
            encoder.check_model(family(name).build(processor=None))
        return str(caught.value)

    alone = refused(t5, "unet_text")
    assert "data.encode.text: padded = false, the usual for one encoder but CLIP, masks the padding of short" in alone
    assert "UNet2DConditionModel takes no mask, as in its pipeline." in alone
    assert alone.endswith("Set data.encode.text.padded = true.")
    plain = {"path": str(folder / "plain"), "max_tokens": 8}
    assert "Set data.encode.text[1].padded = true." in refused([plain, {**t5, "padded": False}], "flux")
    assert "gives texts, but DiTTransformer2DModel takes no texts" in refused(plain, "dit")
    for text, name in (
        ([plain, t5], "flux"),
        (plain, "unet_text"),
        (t5, "pixart"),
        ({**t5, "padded": True}, "unet_text"),
    ):
        encoder = decode(Encoder, {"kind": "image", "text": text}, where="data.encode")
        encoder.check_model(family(name).build(processor=None))
    # An objective of the user's may have texts from elsewhere.
    Images().check_model(family("pixart").build(processor=None))


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


def test_padding_counts_as_text_or_not(folder: Path) -> None:
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
        ({"no_text": "zeros"}, "no_text = zeros is for text encoders: name them in data.encode.text"),
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
    words = rf"has {len(other)} tokens, but the embedding of CLIPTextModel has 17 rows"
    with pytest.raises(RecipeError, match=words):
        family.build(processor=None)


def test_the_widest_comes_last(folder: Path) -> None:
    chosen = [Texts(path=str(folder / name), max_tokens=8) for name in ("clip", "clip_2", "plain")]
    with pytest.raises(RecipeError, match=r"states of 24 are wider than .* \(12\). Name the widest, T5, last"):
        list(TextStack(chosen, "sd3").states(TEXTS))


def test_tokens_of_all_encoders_are_concatenated(folder: Path) -> None:
    text = [{"path": str(folder / name), "max_tokens": 5, "live": True} for name in ("clip", "t5")]
    encoder = decode(Encoder, {"kind": "image", "text": text}, where="data.encode")
    assert isinstance(encoder, Images)
    records = [{"image": np.zeros((4, 4), dtype=int).tolist(), "text": text} for text in TEXTS]
    found = encoder.open(None, length=1).encode_many(records)
    assert [each.truncated for each in found] == [0, 1]
    samples = [sample for each in found for sample in each.samples]
    each = [[1, 4, 5, 7, 3], [1, 16, 15, 14, 3]]
    assert ImageCollator(encoder).collate(samples, length=None)["text_tokens"].tolist() == [ids * 2 for ids in each]


def test_the_vae_that_decodes_is_opened_once_while_it_is_kept(tmp_path: Path) -> None:
    collator = ImageCollator(Images(vae=Latents(path=str(vae_folder(tmp_path / "vae")))))
    latents = torch.ones(1, 2, 4, 4)
    with collator.vae_kept_open():
        expected = collator.decode(latents)
        vae_folder(tmp_path / "vae", seed=1)
        assert torch.equal(collator.decode(latents), expected)
    assert not torch.equal(collator.decode(latents), expected)
