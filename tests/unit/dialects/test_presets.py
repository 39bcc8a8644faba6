"""Presets: the built-in values, the user's own, several of them, and who wins."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.dialects import presets
from fullshard.errors import FullshardError, RecipeError
from fullshard.recipes.read import read, run_facts, save_resolved

RECIPE = "model: {path: x}\ndata: {train: x.jsonl}\n"
BUILT_IN = {
    "single_node_fsdp": {"nodes": 1, "devices": 8, "strategy": "full", "cpu_offload": False},
    "multi_node_fsdp": {"nodes": 4, "devices": 8, "strategy": "full", "cpu_offload": True},
    "large_scale_fsdp": {"nodes": 8, "devices": 8, "strategy": "full", "cpu_offload": True},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(RECIPE)
    return tmp_path


def own(name: str, text: str, *, inside: str = "presets") -> None:
    Path(inside).mkdir(parents=True, exist_ok=True)
    Path(inside, f"{name}.yaml").write_text(text)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_values_of_a_built_in_preset(name: str) -> None:
    recipe = read("r.yaml", preset=name).recipe
    values = BUILT_IN[name]
    assert (recipe.topology.nodes, recipe.topology.devices) == (values["nodes"], values["devices"])
    assert recipe.sharding.strategy == values["strategy"]
    assert recipe.sharding.cpu_offload is values["cpu_offload"]
    assert recipe.sharding.activation_checkpointing == "full"
    assert recipe.sharding.forward_prefetch is (name == "large_scale_fsdp")


def test_a_recipe_names_one_preset_or_several() -> None:
    own("mine", "optimizer: {lr: 3e-3}\ntopology: {nodes: 2}\n")
    Path("one.yaml").write_text(RECIPE + "presets: mine\n")
    assert read("one.yaml").recipe.optimizer.lr == 3e-3
    Path("two.yaml").write_text(RECIPE + "presets: [multi_node_fsdp, mine]\n")
    reading = read("two.yaml")
    assert reading.presets == ("multi_node_fsdp", "mine")
    assert (reading.recipe.topology.nodes, reading.recipe.topology.devices) == (2, 8)
    assert "topology.nodes: 2 (preset mine) over 4 (preset multi_node_fsdp)" in reading.overridden


def test_the_option_comes_after_the_recipe_and_the_last_one_wins() -> None:
    own("a", "seed: 1\nbatch: {per_device: 1}\n")
    own("b", "seed: 2\n")
    own("c", "seed: 3\n")
    Path("r.yaml").write_text(RECIPE + "presets: a\n")
    reading = read("r.yaml", preset=["b", "c"])
    assert (reading.recipe.seed, reading.recipe.batch.per_device) == (3, 1)
    assert reading.typed is not None
    assert reading.typed.command == ("fullshard", "train", "r.yaml", "--preset", "b", "--preset", "c")


def test_the_recipe_and_the_command_line_win_over_presets() -> None:
    own("mine", "seed: 7\noptimizer: {lr: 1e-3}\nbatch: {per_device: 3}\n")
    Path("r.yaml").write_text(RECIPE + "seed: 8\noptimizer: {lr: 2e-3}\npresets: mine\n")
    reading = read("r.yaml", "optimizer.lr=3e-3")
    assert (reading.recipe.seed, reading.recipe.optimizer.lr, reading.recipe.batch.per_device) == (8, 3e-3, 3)
    assert "seed: 8 (recipe) over 7 (preset mine)" in reading.overridden
    assert "optimizer.lr: 3e-3 (command line) over 2e-3 (recipe)" in reading.overridden
    assert "batch.per_device: 3 (preset mine) over 8 (default)" in reading.overridden


def test_the_setting_on_the_command_line_replaces_the_recipes_list() -> None:
    own("mine", "seed: 7\n")
    Path("r.yaml").write_text(RECIPE + "presets: mine\n")
    assert read("r.yaml", "presets=[]").recipe.seed == 0
    assert read("r.yaml", "presets=single_node_fsdp").presets == ("single_node_fsdp",)


def test_ones_own_presets_lie_beside_the_recipe_and_win_over_built_in_ones() -> None:
    Path("configs").mkdir()
    Path("configs/r.yaml").write_text(RECIPE)
    own("mine", "seed: 5\n", inside="configs/presets")
    own("single_node_fsdp", "seed: 6\n", inside="configs/presets")
    assert read("configs/r.yaml", preset="mine").recipe.seed == 5
    assert read("configs/r.yaml", preset="single_node_fsdp").recipe.topology.devices == "auto"
    with pytest.raises(RecipeError, match="preset 'mine' is not known"):
        read("r.yaml", preset="mine")
    own("multi_node_ddp", "seed: 7\n")
    assert read("r.yaml", preset="multi_node_ddp").recipe.seed == 7


def test_an_unknown_name_lists_the_nearest_and_the_users_own() -> None:
    own("cluster", "seed: 5\n")
    with pytest.raises(RecipeError) as raised:
        read("r.yaml", preset="clutser")
    assert "did you mean 'cluster'?" in str(raised.value)
    assert "single_node_fsdp" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("presets: other\n", "a preset cannot name other presets"),
        ("optimiser: {lr: 1}\n", "preset mine: optimiser"),
        ("seed: -1\n", "preset mine: seed"),
        ("- 1\n", "preset mine"),
    ],
)
def test_a_mistake_in_a_preset_names_it(text: str, message: str) -> None:
    own("mine", text)
    with pytest.raises(FullshardError) as raised:
        read("r.yaml", preset="mine")
    assert message in str(raised.value)


def test_what_is_no_name_is_refused() -> None:
    with pytest.raises(RecipeError, match="3 is not the name of a preset"):
        read("r.yaml", "presets=[3]")


def test_the_resolved_recipe_has_the_values_and_not_the_names() -> None:
    own("mine", "seed: 7\n")
    reading = read("r.yaml", preset="mine")
    save_resolved(reading.recipe, Path("resolved.yaml"), facts=run_facts(reading))
    stored = yaml.safe_load(Path("resolved.yaml").read_text())
    assert stored["run"]["presets"] == ["mine"]
    assert "presets" not in stored
    Path("presets/mine.yaml").unlink()
    assert read("resolved.yaml").recipe == reading.recipe


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_lists_and_prints_presets() -> None:
    own("mine", "# My four machines. More about them.\nseed: 7\n")
    lines = shown("presets")
    assert "Yours, in presets/:\nmine  My four machines.\n" in lines
    for name, path in presets.known().items():
        assert f"{name} " in lines
        assert shown("presets", name) == path.read_text()


def test_the_option_can_be_repeated_on_the_command_line() -> None:
    own("mine", "seed: 7\n")
    Path("r.yaml").write_text(
        "model: {architecture: qwen3, size: tiny}\ndata: {train: t.jsonl}\nduration: {steps: 2}\n"
    )
    Path("t.jsonl").write_text('{"input_ids": [1, 2, 3]}\n' * 4)
    text = shown("train", "r.yaml", "--preset", "single_node_fsdp", "--preset", "mine", "--devices", "1", "--dry-run")
    assert "seed: 7" in text
    assert "topology.devices: 1 (command line) over 8 (preset single_node_fsdp)" in text
