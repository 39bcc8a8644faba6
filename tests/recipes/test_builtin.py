"""What is built in works as shipped: every recipe decodes and trains, every preset lies under every recipe, and the
quickstart leaves the run folder that the documentation describes, over its whole life: finished, again, over, further.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import fullshard
from fullshard import builtin
from fullshard.cli import app
from fullshard.log.metrics import read as read_metrics
from fullshard.part import plain
from tests.small import model_folder

RECIPES, PRESETS = sorted(builtin.recipes()), sorted(builtin.presets())
SMALL = ("duration.steps=3", "data.sequence_length=64", "batch.per_device=2", "batch.global=4", "log.every_steps=1")
ON_THE_CPU = ("topology.device=cpu", "topology.devices=1")


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
    return folder


def shrunk(name: str, local: Path) -> list[str]:
    """The overrides that make a built-in recipe small and local; a new recipe needs an entry here."""
    own = {
        "llm": ["model.size=tiny", f"model.tokenizer={local}/model", f"data.train={local}/texts"],
        "quickstart": ["model.tokenizer.train.vocab_size=400", "evaluate.parts=[loss]"],
        "sft": [f"model={local}/model", f"data.train={local}/pairs.jsonl"],
        "sft-lora": [f"model.path={local}/model", f"data.train={local}/pairs.jsonl"],
    }
    return [*SMALL, *ON_THE_CPU, *own[name]]


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
    assert ("adapter_model.safetensors" if name == "sft-lora" else "model.safetensors") in exported


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


QUICKSTART = (
    "duration.steps=3",
    "model.tokenizer.train.vocab_size=400",
    "data.sequence_length=64",
    "evaluate.per_device=32",
    'evaluate.parts=[loss, {kind: sample, prompts: ["The for statement"], tokens: 8}]',
    "log.every_steps=1",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart, shrunk to three steps, on the two ranks that it starts by itself; the folder that holds runs."""
    output = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        result = fullshard.train(fullshard.load("quickstart", *QUICKSTART, f"output={output}"))
    assert (result.folder, result.step, result.stopped) == (str(output / "quickstart"), 3, "done")
    assert result.best == result.validation["loss"]
    return output


@pytest.fixture
def output(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run to go on with."""
    shutil.copytree(finished, tmp_path / "runs", symlinks=True)
    return tmp_path / "runs"


def command(output: Path, *words: str, steps: int = 3) -> str:
    """What `fullshard train quickstart` says, on one rank, in this process."""
    line = [
        "train",
        "quickstart",
        *QUICKSTART[1:],
        f"duration.steps={steps}",
        f"output={output}",
        "--devices",
        "1",
        *words,
    ]
    result = CliRunner().invoke(app, line, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def contents(folder: Path) -> dict[str, str]:
    """Every file but the lock, which says who used the folder last."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    files = [path for path in files if path.suffix != ".lock"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_run_folder(finished: Path) -> None:
    run = finished / "quickstart"
    assert sorted(path.name for path in run.iterdir() if not path.name.startswith(".")) == [
        "best",
        "checkpoint-3",
        "last",
        "log.txt",
        "logs",
        "metrics.jsonl",
        "model",
        "recipe.resolved.yaml",
        "units.json",
    ]
    assert [os.readlink(run / pointer) for pointer in ("best", "last")] == ["checkpoint-3"] * 2
    assert list((run / "logs").rglob("events.out.tfevents.*"))
    manifest = json.loads((run / "checkpoint-3" / "manifest.json").read_text())
    for name, facts in manifest["files"].items():
        stored = (run / "checkpoint-3" / name).read_bytes()
        assert (len(stored), hashlib.sha256(stored).hexdigest()) == (facts["size_bytes"], facts["sha256"])
    units = json.loads((run / "units.json").read_text())["units"]
    assert {"class_name", "parameters", "storage", "compute", "reduce", "trainable_fraction", "tied"} <= units[0].keys()


def test_what_the_run_wrote_down(finished: Path) -> None:
    run = finished / "quickstart"
    records = read_metrics(run / "metrics.jsonl")
    trained = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in trained] == [1, 2, 3]
    wanted = [
        "epoch",
        "loss",
        "lr",
        "grad_norm",
        "samples",
        "tokens",
        "seconds",
        "tokens_per_second",
        "memory_gib",
        "data_wait",
    ]
    assert set(wanted) <= trained[-1].keys()
    assert {record["kind"] for record in records} == {"train", "validation", "event"}
    log = (run / "log.txt").read_text()
    for words in ("2 ranks, CPU, gloo", "New Best Val Loss", "Sample continuation of 'The for statement'"):
        assert words in log
    resolved = fullshard.load(run / "recipe.resolved.yaml")
    assert resolved.sharding.strategy != "auto"
    assert resolved.precision in ("bf16", "fp32")
    assert yaml.safe_load((run / "recipe.resolved.yaml").read_text())["run"]["versions"]["torch"]


def test_transformers_loads_the_model_and_generates(finished: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(finished / "quickstart" / "model")
    model = AutoModelForCausalLM.from_pretrained(finished / "quickstart" / "model")
    prompt = tokenizer("The for statement", return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert len(ids[0]) == len(prompt["input_ids"][0]) + 5
    assert tokenizer.decode(ids[0]).startswith("The for statement")


def test_running_it_again_says_that_it_is_finished(output: Path) -> None:
    before = contents(output)
    said = command(output)
    assert f"{output / 'quickstart'} is finished: 3 steps are done" in " ".join(said.split())
    assert "fullshard train quickstart --resume never" in said
    assert "fullshard train quickstart duration.steps=6" in said
    assert contents(output) == before


def test_starting_over_keeps_the_old_run(output: Path) -> None:
    before = contents(output / "quickstart")
    said = " ".join(command(output, "--resume", "never").split())
    assert f"the earlier run is kept in {output / 'quickstart.old-1'}" in said
    assert contents(output / "quickstart.old-1") == before
    old, new = (read_metrics(output / name / "metrics.jsonl") for name in ("quickstart.old-1", "quickstart"))
    assert [record["step"] for record in new if record["kind"] == "train"] == [1, 2, 3]
    assert new[0]["seconds"] != old[0]["seconds"]


def test_a_longer_duration_goes_on_from_the_checkpoint(output: Path) -> None:
    before = (output / "quickstart" / "metrics.jsonl").read_text().splitlines()
    said = " ".join(command(output, steps=5).split())
    assert f"Resuming from {output / 'quickstart' / 'checkpoint-3'}" in said
    after = (output / "quickstart" / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in before if json.loads(line)["kind"] == "train"]
    found = [line for line in after if json.loads(line)["kind"] == "train"]
    assert found[:3] == kept
    assert [json.loads(line)["step"] for line in found] == [1, 2, 3, 4, 5]
    assert os.readlink(output / "quickstart" / "last") == "checkpoint-5"
