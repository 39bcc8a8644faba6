"""What `fullshard.train` returns: fields, checkpoints, metrics, the live model and the exported one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel

import fullshard
from fullshard import CheckpointError, RecipeError, SetupError
from fullshard.checkpoint import folder as files
from fullshard.contracts.progress import Result as Ended
from fullshard.own_loop.result import of
from tests.small import model_folder, recipe, token_file

TOKENS = torch.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("door")
    model_folder(folder / "model")
    token_file(folder / "train.jsonl", records=40)
    return folder


def settings(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    base = recipe(folder, topology={"devices": 1}, duration={"steps": 4}, **sections)
    return base | {
        "name": name,
        "data": base["data"] | {"holdout": 0.2},
        "evaluate": {"parts": ["loss"], "every_steps": 2},
        "checkpoint": {"best": "loss"},
    }


def test_a_mapping_in_one_process(folder: Path) -> None:
    """Everything that the result promises, and the live model computes what the exported one does."""
    result = fullshard.train(settings(folder, "one"))
    assert (result.step, result.samples, result.stopped, result.folder) == (4, 64, "done", str(folder / "runs" / "one"))
    assert result.epoch == 2  # 32 records in steps of 16
    assert result.tokens > 0
    assert result.seconds > 0
    best = result.best_checkpoint
    assert best
    assert (best.step, best.value, best.metric) == (result.best_step, result.best, "min loss")
    assert files.read_manifest(best.path)["step"] == best.step
    assert result.last_checkpoint == folder / "runs" / "one" / "checkpoint-4"
    table = pandas.DataFrame(result.metrics)
    train, validation = table[table.kind == "train"], table[table.kind == "validation"]
    assert list(train.step) == [1, 2, 3, 4]
    assert list(validation.step) == [2, 4]
    assert validation.loss.min() == best.value
    assert train["time.compute"].notna().all()
    loaded = result.load(dtype=torch.float32)
    assert isinstance(loaded, PreTrainedModel)
    with torch.no_grad():
        assert torch.equal(result.model(TOKENS).logits, loaded(TOKENS).logits)
        assert not torch.equal(loaded(TOKENS).logits, AutoModelForCausalLM.from_pretrained(folder / "model")(TOKENS)[0])

    again = fullshard.train(settings(folder, "one"))  # it is finished: nothing is trained
    assert (again.step, again.samples, again.best_checkpoint) == (4, 64, best)
    with pytest.raises(SetupError, match=r"result\.load\(\)"):
        _ = again.model
    assert isinstance(again.load(), PreTrainedModel)


def test_a_path_with_settings_on_two_ranks(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The ranks are other processes: there is no live model, and the exported one is that of one process."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings(folder, "two")))
    result = fullshard.train(path, "topology.devices=2", "log.every_steps=2")
    assert (result.step, result.samples, result.tokens) == (4, 64, fullshard.train(settings(folder, "one")).tokens)
    assert [record["step"] for record in result.metrics if record["kind"] == "train"] == [1, 2, 4]
    with pytest.raises(SetupError, match=r"result\.load\(\)"):
        _ = result.model
    assert isinstance(result.load(), PreTrainedModel)
    said = capfd.readouterr().out
    assert "fullshard.train(fullshard.read('" in said  # a hint for Python, not for a shell


def test_adapters_are_loaded_by_peft(folder: Path) -> None:
    import peft

    lora = {"path": str(folder / "model"), "lora": {"r": 4}}
    result = fullshard.train(settings(folder, "adapters") | {"model": lora, "duration": {"steps": 2}})
    assert result.adapted
    assert isinstance(result.load(), peft.PeftModelForCausalLM)


def test_every_ecosystem_has_its_own_loader(tmp_path: Path) -> None:
    import diffusers
    import sentence_transformers
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({"one": 0, "two": 1}, unk_token="one"))
    static = StaticEmbedding(words, embedding_weights=torch.eye(2).numpy())
    saved: dict[str, Any] = {
        "embedding": sentence_transformers.SentenceTransformer(modules=[static]),
        "diffusion": diffusers.UNet2DModel(
            sample_size=8, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1, attention_head_dim=4,
            down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
        ),
    }  # fmt: skip
    for name, model in saved.items():
        model.save_pretrained(str(tmp_path / name / "model"))
        ended = Ended(str(tmp_path / name), 1, None, None, {}, "done", 1.0)
        assert type(of(ended, fullshard.read(name)).load()) is type(model)


def test_a_stopped_run_says_how_to_get_its_model(folder: Path) -> None:
    ended = Ended(str(folder / "nothing"), 3, None, None, {}, "signal", 1.0)
    result = of(ended, fullshard.read(settings(folder, "nothing")))
    assert (result.best_checkpoint, result.last_checkpoint, result.metrics) == (None, None, [])
    with pytest.raises(CheckpointError, match=r"stopped after 3 steps.*fullshard\.train again.*fullshard export"):
        result.load()


def test_what_is_not_a_recipe() -> None:
    with pytest.raises(RecipeError, match=r"fullshard\.train takes a recipe, found 3\. Give a path"):
        fullshard.train(3)
    with pytest.raises(RecipeError, match="quickstrat is neither a file nor a built-in recipe"):
        fullshard.train("quickstrat")


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        (({"optimizer.lr": 1},), {}, "is of type dict. Settings are strings, each an argument of its own"),
        ((["seed=1"],), {}, "is of type list. Settings are strings"),
        ((None,), {}, "the setting None is of type NoneType"),
        ((), {"resume": True}, 'resume = True; allowed: "auto", "never", or a checkpoint'),
        ((), {"resume": None}, 'resume = None; allowed: "auto", "never", or a checkpoint'),
        ((), {"resume_anyway": "yes"}, "resume_anyway = 'yes'; it must be True or False"),
        ((), {"stage": 2}, "stage = 2: a mapping has no stages"),
    ],
)
def test_wrong_types_beside_the_recipe(settings: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as error:
        fullshard.train({"model": {"path": "x"}, "data": {"train": "x.jsonl"}}, *settings, **options)
    assert said in str(error.value)


def test_a_stage_that_does_not_exist() -> None:
    stages = [{"name": "one"}, {"name": "two"}]
    with pytest.raises(RecipeError, match="^stage = tow: there is no such stage"):
        fullshard.train({"model": {"path": "x"}, "data": {"train": "x.jsonl"}, "stages": stages}, stage="tow")


def test_settings_on_top_of_a_recipe_object(folder: Path) -> None:
    read = fullshard.read(settings(folder, "objects"))
    assert fullshard.train(read, "duration={steps: 1}", "evaluate={parts: []}", "checkpoint={best: null}").step == 1


def test_one_stage_or_all(folder: Path) -> None:
    stages = [{"name": "first", "duration": {"steps": 1}}, {"name": "second", "duration": {"steps": 2}}]
    staged = settings(folder, "staged") | {"stages": stages}
    first: Any = fullshard.train(staged, stage="first")
    assert (first.step, list(first.stages)) == (1, ["first"])
    every: Any = fullshard.train(staged)
    assert (every.step, {name: each.step for name, each in every.stages.items()}) == (2, {"first": 1, "second": 2})
    assert isinstance(every.load(), PreTrainedModel)
    with pytest.raises(RecipeError, match="there is no such stage.*Stages: first, second"):
        fullshard.train(staged, stage="third")
    with pytest.raises(RecipeError, match="stage = 'first': a mapping has no stages"):
        fullshard.train(settings(folder, "one"), stage="first")


def under_torchrun(settings: dict[str, Any]) -> tuple[float, bool]:
    """One rank of a program under a launcher: the live model works after the run, with its process group."""
    result = fullshard.train(settings)
    with torch.no_grad():
        logits = result.model(TOKENS).logits
    return float(logits.double().sum()), torch.distributed.is_initialized()


def test_the_live_model_under_a_launcher(folder: Path, ranks: Any) -> None:
    wanted = settings(folder, "ranks")
    wanted["topology"] = {"device": "cpu"}
    found = ranks.run(under_torchrun, wanted, world=2)
    assert found[0] == found[1]
    assert found[0][1]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder / "runs" / "ranks" / "model")(TOKENS).logits
    assert found[0][0] == pytest.approx(float(expected.double().sum()), rel=1e-6)
