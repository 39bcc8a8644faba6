"""What is built in works as shipped: every recipe decodes and trains, every preset goes under every recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import fullshard
from fullshard.config import families
from fullshard.config.part import plain
from fullshard.dialects import presets
from fullshard.log.metrics import read as read_metrics
from tests.shrunk_recipes import local_inputs, shrunk
from tests.slow import one_in

RECIPES, PRESETS = sorted(families.recipes()), sorted(presets.known())
ADAPTED = ("embedding-8b", "paper_r64", "sft-lora")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return local_inputs(tmp_path_factory.mktemp("local") / "inputs")


def ranks(name: str) -> list[str]:
    """As many ranks as shipped, each a process of its own: what differs between processes stops a run."""
    shipped = yaml.safe_load(families.recipes()[name].read_text()).get("topology", {})
    return [] if "devices" in shipped else ["topology.devices=1"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_decodes_as_shipped(name: str) -> None:
    recipe = fullshard.read(name)
    assert recipe.name == name
    assert fullshard.read(plain(recipe)) == recipe


@pytest.mark.parametrize("name", one_in(4, RECIPES))
def test_a_recipe_trains_three_steps(name: str, local: Path, tmp_path: Path) -> None:
    result = fullshard.train(fullshard.read(name, *shrunk(name, local), *ranks(name), f"output={tmp_path}"))
    assert (result.step, result.stopped) == (3, "done")
    records = read_metrics(Path(result.folder) / "metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2, 3]
    assert 0 < result.validation["loss"] < 10
    exported = {path.name for path in (tmp_path / name / "model").iterdir()}
    weights = {"diffusion": "diffusion_pytorch_model"} | dict.fromkeys(ADAPTED, "adapter_model")
    assert f"{weights.get(name, 'model')}.safetensors" in exported


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", RECIPES)
def test_a_preset_goes_under_a_recipe(name: str, preset: str) -> None:
    below = yaml.safe_load(presets.known()[preset].read_text())
    stated = yaml.safe_load(families.recipes()[name].read_text())
    in_force = plain(fullshard.read(name, preset=preset))
    assert below
    for section, values in below.items():
        for key, value in values.items():
            said = stated.get(section, {}).get(key, value)
            assert in_force[section][key] == said, f"{section}.{key}"
