"""The settings of audio language models: architectures, presets of adapters, towers, and packages that are missing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForMultimodalLM

import fullshard
from fullshard.errors import RecipeError
from fullshard.families.audio.models.audio_lm import AudioLM
from fullshard.families.audio.processor import because, load_audio_processor
from fullshard.families.audio.sizes import tiny_audio
from fullshard.families.audio.unused import unused
from fullshard.hf.adapters.settings import Lora
from fullshard.multimodal import towers
from tests.families.audio.small import model_folder
from tests.small import model_folder as text_folder


@pytest.mark.parametrize(
    ("short", "expected"),
    [
        ("paper_r64", (64, 128, 0.05)),
        ("pretrained_r320", (320, 640, 0.01)),
        ({"preset": "paper_r64", "r": 8}, (8, 128, 0.05)),
        (16, (16, 32, 0.0)),
    ],
)
@pytest.mark.parametrize("kind", ["hf", "audio_lm"])
def test_adapters_by_the_name_of_a_preset(kind: str, short: object, expected: tuple[float, ...]) -> None:
    """For every family."""
    recipe = fullshard.read({"model": {"kind": kind, "path": "m", "lora": short}, "data": {"train": "t.jsonl"}})
    lora: Lora = recipe.model.lora  # type: ignore[attr-defined]
    assert (lora.r, lora.alpha, lora.dropout) == expected


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(RecipeError, match="must be one of paper_r64, pretrained_r320"):
        fullshard.read({"model": {"kind": "audio_lm", "path": "m", "lora": "paper64"}, "data": {"train": "t.jsonl"}})


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(RecipeError, match="did you mean 'qwen2_audio'.*Known: gemma3n, phi4_multimodal"):
        AudioLM(architecture="qwen_audio", size="tiny")._config()


def test_towers_inside_the_language_model_are_found() -> None:
    config_class = CONFIG_MAPPING["phi4_multimodal"]
    config = config_class(**tiny_audio(config_class()))
    module = AutoModelForMultimodalLM.from_config(config)
    found = towers.find(module)
    inside = "model.embed_tokens_extend."
    assert found["audio"] == [f"{inside}audio_embed.encoder"]
    assert found["vision"] == [f"{inside}image_embed.img_processor"]
    assert f"{inside}audio_embed.up_proj_for_speech" in found["projector"]
    assert towers.tower_of("model.layers.0.mlp.down_proj.weight", found) == "language"
    names = [name for name, _ in module.named_parameters() if towers.tower_of(name, found) != "language"]
    never = unused(config, names)
    assert all("image_embed" in name or "for_vision_speech" in name for name in never)
    assert {name for name in names if "image_embed" in name} <= set(never)


def test_a_tower_inside_another_keeps_its_own_rate() -> None:
    """Without a setting of its own it has that of the optimizer, not the outer tower's."""
    found = {"language": ["model", "lm_head"], "audio": ["model.extend.encoder"], "projector": ["model.extend.up"]}
    groups = towers.groups({"language": towers.Tower(lr=1e-5), "projector": towers.Tower(lr=1e-3)}, found)

    def rate(name: str) -> float | None:
        return next(group.lr for group in groups if group.holds(name))

    assert rate("model.layers.0.weight") == rate("lm_head.weight") == 1e-5
    assert rate("model.extend.up.weight") == 1e-3
    assert rate("model.extend.encoder.weight") is None


def test_a_folder_is_recognised_by_its_config(tmp_path: Path) -> None:
    assert AudioLM.recognises(model_folder(tmp_path / "audio", "qwen2_audio"))
    assert AudioLM.recognises(model_folder(tmp_path / "speech", "whisper"))
    assert not AudioLM.recognises(text_folder(tmp_path / "text"))


def test_layers_that_are_dropped_at_random_are_refused() -> None:
    overrides = {"audio_config": {"encoder_layerdrop": 0.1}}
    with pytest.raises(RecipeError, match=r"audio_config\.encoder_layerdrop=0"):
        AudioLM(architecture="qwen2_audio", size="tiny", overrides=overrides).build(processor=None)


def test_a_missing_package_comes_with_its_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests of this process may have registered a stand-in for the tower that needs it.
    monkeypatch.setattr(AutoModel._model_mapping, "_extra_content", {})
    error = ImportError("Phi4MultimodalImageProcessor requires the Torchvision library but it was not found")
    assert because(error).endswith("pip install torchvision")
    assert "pip install mistral-common" in because(ImportError("MistralCommonBackend requires the mistral_common ..."))
    with pytest.raises(RecipeError, match="pip install timm"):
        AudioLM(architecture="gemma3n", size="tiny").build(processor=None)
    folder = model_folder(tmp_path / "model", "qwen2_audio")
    config = CONFIG_MAPPING["qwen2_audio"]()
    (folder / "preprocessor_config.json").write_text('{"feature_extractor_type": "NoSuchExtractor"}')
    with pytest.raises(RecipeError, match="the feature extractor in .* cannot be loaded"):
        load_audio_processor(folder, None, config=config, trust_remote_code=False, where="model.path")


@pytest.mark.parametrize("other", [{"lora": True}, {"lr": 1e-4}])
def test_what_a_frozen_tower_would_ignore_is_refused(other: dict[str, object]) -> None:
    """Adapters in a frozen tower would stay as they are, and so would its learning rate."""
    model = {"kind": "audio_lm", "path": "m", "towers": {"audio": {"freeze": True, **other}}}
    with pytest.raises(RecipeError, match=rf"audio.freeze and .*audio.{next(iter(other))} exclude each other"):
        fullshard.read({"model": model, "data": {"train": "t.jsonl"}})


@pytest.mark.parametrize(
    ("extractor", "package"), [("GraniteSpeechFeatureExtractor", "torchaudio"), ("ParakeetFeatureExtractor", "librosa")]
)
def test_extractors_that_need_another_package_say_so(tmp_path: Path, extractor: str, package: str) -> None:
    """Transformers' own, which are asked for here: without its package neither can be made."""
    assert importlib.util.find_spec(package) is None
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"feature_extractor_type": extractor}))
    config = CONFIG_MAPPING["qwen2_audio"]()
    with pytest.raises(RecipeError, match=rf"it needs {package}\. Install it with: pip install {package}"):
        load_audio_processor(tmp_path, None, config=config, trust_remote_code=False, where="model.path")


def test_a_learning_rate_of_a_tower_that_is_not_trained_is_refused(tmp_path: Path) -> None:
    """Under LoRA only what has adapters is trained."""
    folder = model_folder(tmp_path / "model", "qwen2_audio")

    def build(**tower: Any) -> None:
        family = AudioLM(path=str(folder), lora=Lora(r=4), towers={"projector": towers.Tower(**tower)})
        family.build(processor=family.load_processor(folder, where="model.path"))

    build(lr=1e-4, lora=True)
    with pytest.raises(RecipeError, match=r"model.towers.projector.lr = 0.0001: nothing in projector is trained.*lora"):
        build(lr=1e-4)
