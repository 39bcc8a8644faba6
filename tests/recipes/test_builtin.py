"""What is built in works as shipped: every recipe decodes and trains, every preset lies under every recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import fullshard
from fullshard.config import builtin
from fullshard.config.part import plain
from fullshard.log.metrics import read as read_metrics
from tests.families.embedding import vision
from tests.small import model_folder

RECIPES, PRESETS = sorted(builtin.recipes()), sorted(builtin.presets())
SMALL = ("duration.steps=3", "data.sequence_length=64", "batch.per_device=2", "batch.global=4", "log.every_steps=1")
ADAPTED = ("embedding-8b", "sft-lora")
ON_THE_CPU = ("topology.device=cpu",)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user brings to a recipe: texts, question-answer pairs, and a model folder with its tokenizer."""
    from pydoc_data.topics import topics

    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("local")
    (folder / "texts").mkdir()
    some = sorted(topics)[:12]
    for name in some:
        (folder / "texts" / f"{name}.txt").write_text(topics[name][:2000])
    pairs = [{"question": f"What is {name}?", "answer": " ".join(topics[name].split()[:20])} for name in some]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        [topics[name] for name in some], vocab_size=400, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|end|>")
    model_folder(folder / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder / "model")
    vision.vision_folder(folder / "vision", kind="qwen3_vl")
    vision.pictures(folder / "seen")
    return folder


def shrunk(name: str, local: Path) -> list[str]:
    """The overrides that make a built-in recipe small and local; a new recipe needs an entry here."""
    own = {
        "diffusion": ["data.train={kind: digits, part: train}", "evaluate.parts=[loss]", "evaluate.per_device=64"],
        "embedding": [
            f"data.train={local}/pairs.jsonl",
            "data.validation=null",
            "data.holdout=0.25",
            "evaluate.parts=[loss, retrieval]",
        ],
        "embedding-8b": [
            f"model.path={local}/vision",
            "model.max_pixels=3136",
            "objective.matryoshka=[64, 16]",
            "objective.cache=4",
            f"data.train={local}/seen/pairs.jsonl",
            "data.validation=null",
            "data.holdout=0.25",
            f"data.encode.image_root={local}/seen/images",
            "evaluate.parts=[loss, retrieval]",
        ],
        "llm": ["model.size=tiny", f"model.tokenizer={local}/model", f"data.train={local}/texts"],
        "quickstart": ["model.tokenizer.train.vocab_size=400", "evaluate.parts=[loss]"],
        "sft": [f"model={local}/model", f"data.train={local}/pairs.jsonl"],
        "sft-lora": [f"model.path={local}/model", f"data.train={local}/pairs.jsonl"],
    }
    # As many ranks as shipped, each a process of its own: what differs from process to process stops a run.
    shipped = yaml.safe_load(builtin.recipes()[name].read_text()).get("topology", {})
    ranks = [] if "devices" in shipped else ["topology.devices=1"]
    return [*SMALL, *ON_THE_CPU, *ranks, *own[name]]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_decodes_as_shipped(name: str) -> None:
    recipe = fullshard.load(name)
    assert recipe.name == name
    assert fullshard.load(plain(recipe)) == recipe


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_three_steps(name: str, local: Path, tmp_path: Path) -> None:
    result = fullshard.train(fullshard.load(name, *shrunk(name, local), f"output={tmp_path}"))
    assert (result.step, result.stopped) == (3, "done")
    records = read_metrics(tmp_path / name / "metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2, 3]
    assert 0 < result.validation["loss"] < 10
    exported = {path.name for path in (tmp_path / name / "model").iterdir()}
    weights = {"diffusion": "diffusion_pytorch_model"} | dict.fromkeys(ADAPTED, "adapter_model")
    assert f"{weights.get(name, 'model')}.safetensors" in exported


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", RECIPES)
def test_a_preset_lies_under_a_recipe(name: str, preset: str) -> None:
    below = yaml.safe_load(builtin.presets()[preset].read_text())
    stated = yaml.safe_load(builtin.recipes()[name].read_text())
    in_force = plain(fullshard.load(name, preset=preset))
    assert below
    for section, values in below.items():
        for key, value in values.items():
            said = stated.get(section, {}).get(key, value)
            assert in_force[section][key] == said, f"{section}.{key}"
