"""`stages:` in a recipe: each stage is a complete recipe, and every mistake names the key that caused it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fullshard
from fullshard.recipes.read import read

BASE: dict[str, Any] = {
    "name": "mine",
    "output": "out",
    "model": {"architecture": "qwen3", "size": "tiny", "tokenizer": {"train": {"vocab_size": 512}}},
    "optimizer": {"lr": 1e-3},
    "stages": [
        {"name": "pretrain", "data": {"train": "texts.jsonl"}, "duration": {"epochs": 2}},
        {"name": "sft", "data": {"train": "pairs.jsonl", "encode": "chat"}, "optimizer": {"lr": 1e-4}},
    ],
}


def stages(*overrides: str, **changes: Any) -> list[Any]:
    return list(fullshard.read({**BASE, **changes}, *overrides).stages or [])


def with_second(**settings: Any) -> list[dict[str, Any]]:
    first, second = BASE["stages"]
    return [first, {**second, **settings}]


def test_each_stage_is_a_complete_recipe_in_its_own_folder() -> None:
    pretrain, sft = stages()
    assert (pretrain.folder, sft.folder) == (Path("out/mine/pretrain"), Path("out/mine/sft"))
    assert (pretrain.optimizer.lr, sft.optimizer.lr) == (1e-3, 1e-4)
    assert (pretrain.duration.epochs, sft.duration.epochs) == (2, 1), "a setting of one stage is not the next one's"
    assert sft.data.encode.kind() == "chat"
    assert pretrain.data.encode is None


def test_a_stage_starts_from_the_one_before_with_its_tokenizer() -> None:
    pretrain, sft = stages()
    assert pretrain.start is None
    assert (sft.start.source, sft.start.weights, sft.start.optimizer) == ("out/mine/pretrain", "last", None)
    assert sft.model.start == "out/mine/pretrain/last"
    assert sft.model.tokenizer.path == "out/mine/pretrain/last/processor"
    assert (sft.model.architecture, sft.model.size) == ("qwen3", "tiny")


def test_a_stage_may_start_from_the_best_of_any_earlier_one() -> None:
    more = [
        *BASE["stages"],
        {"name": "again", "data": {"train": "x"}, "start": {"from": "pretrain", "weights": "best"}},
    ]
    assert stages(stages=more)[2].model.start == "out/mine/pretrain/best"


def test_a_stage_may_name_its_own_weights_and_tokenizer() -> None:
    own = {"from": "elsewhere/last", "tokenizer": "some/tokenizer"}
    sft = stages(stages=with_second(model=own))[1]
    assert (sft.model.start, sft.model.tokenizer.path) == ("elsewhere/last", "some/tokenizer")


def test_the_command_line_is_on_top_of_every_stage_and_of_one() -> None:
    pretrain, sft = stages("optimizer.lr=5", "stages.sft.duration.steps=7", "name=other")
    assert (pretrain.optimizer.lr, sft.optimizer.lr) == (5, 5)
    assert (pretrain.duration.epochs, sft.duration.steps) == (2, 7)
    assert sft.start.source == "out/other/pretrain"
    assert [each.optimizer.lr for each in stages("optimizer.lr=5", "stages.sft.optimizer.lr=6")] == [5, 6]


def test_a_setting_for_all_stages_goes_with_data_that_only_the_stages_name() -> None:
    lengths = [stage.data.sequence_length for stage in stages("data.sequence_length=64", "model.lora=true")]
    assert lengths == [64, 64]
    assert [stage.data.workers for stage in stages(data={"workers": 3})] == [3, 3]


def test_a_setting_for_all_stages_of_a_section_that_only_stages_complete() -> None:
    recipe = fullshard.read(BASE, "data.sequence_length=64")
    assert [each.data.sequence_length for each in recipe.stages or []] == [64, 64]
    assert recipe.data.sequence_length == 64


def test_the_command_line_may_bring_all_stages() -> None:
    words = "stages=[{name: a, data: {train: x}}, {name: b, data: {train: y}}]"
    assert [each.name for each in stages(words, "stages.b.optimizer.lr=6")] == ["a", "b"]
    assert stages(words, "stages.b.optimizer.lr=6")[1].optimizer.lr == 6


def test_what_replaced_what_is_noted_for_each_stage() -> None:
    notes = read(BASE, "stages.sft.optimizer.lr=6", "batch.per_device=2").notes
    assert list(notes["pretrain"]) == ["batch.per_device: 2 (command line) over 8 (default)"]
    assert notes["sft"][1] == "optimizer.lr: 6 (command line, stages.sft) over 1e-4 (stages.sft)"


def test_another_kind_does_not_inherit_defaults_of_the_first() -> None:
    changed = with_second(optimizer={"kind": "muon"})
    assert (
        stages(stages=changed)[1].optimizer
        == fullshard.read(
            {**{key: value for key, value in BASE.items() if key != "stages"}, "data": {"train": "x"}},
            "optimizer.kind=muon",
        ).optimizer
    )


def test_a_mapping_of_stages_and_a_remote_store() -> None:
    by_name = {entry["name"]: {k: v for k, v in entry.items() if k != "name"} for entry in BASE["stages"]}
    sft = stages(stages=by_name, output="s3://bucket/runs")[1]
    assert sft.folder == Path("runs/mine/sft")
    assert sft.checkpoint.store == "s3://bucket/runs/mine"
    assert sft.model.start == "s3://bucket/runs/mine/pretrain/last"
    assert sft.model.tokenizer.path == "runs/mine/pretrain/model", "a file of a checkpoint in a store has no path"


RECIPE = """\
name: mine
model: {architecture: qwen3, size: tiny}
optimizer: {lr: 1e-3}
stages:
  - name: pretrain
    data: {train: a.jsonl}
  - name: sft
    data: {train: b.jsonl}
    optimizer:
      lr: 1e-4
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "      lr: 1e-4",
            "      lrr: 1e-4",
            "line 10: stages.sft.optimizer.lrr is not a known key (did you mean",
        ),
        ("    optimizer:\n", "    optimzer:\n", "line 9: stages.sft.optimzer is not a known key (did you mean"),
        ("optimizer: {lr: 1e-3}", "optimizer: {lr: no}", "line 3: optimizer.lr = false: it must be a number."),
        ("    data: {train: b.jsonl}\n", "", "stages.sft.data is missing"),
        ("name: sft", "name: pretrain", "'pretrain' names two stages"),
        ("name: sft", "name: best", "'best' cannot name a stage"),
        ("name: sft", "name: sft\n    output: x", "stages.sft.output: a stage cannot have it"),
        ("name: sft", "name: sft\n    presets: mine", "stages.sft.presets: presets lie under the whole recipe"),
        (
            "name: pretrain",
            "name: pretrain\n    model: {lora: {r: 4}}",
            "line 8: stages.sft.model.lora = null: pretrain trains adapters",
        ),
        (
            "name: sft",
            "name: sft\n    start: {from: pretain}",
            "line 8: stages.sft.start.from = 'pretain' is no earlier",
        ),
        (
            "name: sft",
            "name: sft\n    start: {weights: bst}",
            "line 8: stages.sft.start.weights = 'bst': it must be one",
        ),
        ("stages:\n", "checkpoint: {at_end: false}\nstages:\n", "checkpoint.at_end = false: sft starts from its last"),
    ],
)
def test_a_mistake_names_its_line_and_the_key_of_the_stage(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace(old, new))
    with pytest.raises(fullshard.RecipeError) as error:
        fullshard.read(path)
    assert expected in str(error.value)
    assert len(str(error.value).splitlines()) == 1, "said once, not once for each stage"


def test_a_stage_that_does_not_exist_is_told_by_the_nearest() -> None:
    with pytest.raises(fullshard.RecipeError, match=r"stages.sfft: there is no such stage \(did you mean 'sft'\?\)"):
        stages("stages.sfft.optimizer.lr=1")


def test_best_and_carry_need_what_the_earlier_stage_gives() -> None:
    with pytest.raises(fullshard.RecipeError, match=r"stages.pretrain.checkpoint.best is null"):
        stages("checkpoint.best=null", stages=with_second(start={"weights": "best"}))
    with pytest.raises(fullshard.RecipeError, match="state of one does not fit the other"):
        stages(stages=with_second(start={"optimizer": "carry"}, optimizer={"kind": "muon"}))


def test_all_weights_after_lora_is_refused_before_anything_is_trained() -> None:
    stage = {"data": {"train": "x"}}
    adapted = {**stage, "name": "lora", "model": {"lora": {"r": 4}}}
    with pytest.raises(
        fullshard.RecipeError, match=r"stages\.full\.model\.lora = null: lora trains adapters.*--as merg"
    ):
        stages(stages=[adapted, {**stage, "name": "full"}])
    with pytest.raises(fullshard.RecipeError, match=r"stages\.more\.model\.lora\.r = 8: .* r = 4"):
        stages(stages=[adapted, {**stage, "name": "more", "model": {"lora": {"r": 8}}}])
    assert stages(stages=[adapted, {**adapted, "name": "again"}])[1].model.lora.r == 4
    assert stages(stages=[adapted, {**stage, "name": "full", "start": None}])[1].start is None


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("stages.sft=3", r"stages\.sft must be a mapping"),
        ("stages.sft.name=other", r"stages\.sft\.name: a stage is named in its recipe"),
        ("stages.sft.output=x", r"stages\.sft\.output: a stage cannot have it"),
        ("stages.sft={output: x}", r"stages\.sft\.output: a stage cannot have it"),
        ("stages.sft.presets=mine", r"stages\.sft\.presets: presets lie under the whole recipe"),
        ("stages[1].seed=3", r"stages\[1\]\.seed: stages go by their names\. Stage 2 is sft: stages\.sft\.seed=3\."),
        ("stages.1.seed=3", r"Stage 1 is pretrain: stages\.pretrain\.seed=3\."),
        ("stages[2].seed=3", r"stages go by their names\. Stages: pretrain, sft\."),
        ("stages.3.seed=3", r"stages\.3: there is no such stage\. Stages: pretrain, sft\."),
        ("stages.sft.stages=[]", r"stages\.sft\.stages: a stage cannot have stages of its own"),
        ("stages.pretrain.start.from=sft", r"'sft' does not come before this stage"),
        ("stages.pretrain.start.from=pretrain", r"'pretrain' does not come before this stage"),
    ],
)
def test_a_setting_of_a_stage_is_never_ignored(setting: str, words: str) -> None:
    with pytest.raises(fullshard.RecipeError, match=words):
        stages(setting)


def test_several_settings_of_a_stage_may_be_one_mapping() -> None:
    pretrain, sft = stages("stages.sft={optimizer: {lr: 3e-5}, seed: 7}")
    assert (sft.optimizer.lr, sft.seed, pretrain.seed) == (3e-5, 7, 0)


def test_presets_lie_under_the_recipe_its_stages_and_the_command_line(tmp_path: Path) -> None:
    """Later presets over earlier ones, the recipe over presets, a stage over the recipe, the command line over all."""
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "a.yaml").write_text("seed: 1\noptimizer: {lr: 1, clip: 2}\nbatch: {per_device: 3}\n")
    (tmp_path / "presets" / "b.yaml").write_text("seed: 2\noptimizer: {clip: 4}\n")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    found = [
        (each.seed, each.optimizer.lr, each.optimizer.clip, each.batch.per_device)
        for each in fullshard.read(path, "batch.per_device=5", preset=["a", "b"]).stages or []
    ]
    assert found == [(2, 1e-3, 4, 5), (2, 1e-4, 4, 5)]
    other = [
        (each.seed, each.optimizer.lr, each.optimizer.clip)
        for each in fullshard.read(path, "stages.sft.seed=7", preset=["b", "a"]).stages or []
    ]
    assert other == [(1, 1e-3, 2), (7, 1e-4, 2)]
