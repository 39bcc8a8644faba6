"""Commands that a run prints work when pasted, with settings, options and names that contain spaces."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fullshard.card.load_code import importing
from fullshard.cli import app
from fullshard.commands import rerun
from fullshard.log.metrics import read as read_metrics
from fullshard.recipes.read import Reading, Typed, hand_on, read, read_recipe
from fullshard.run import execute
from tests import small

Say = Callable[..., str]
NAME = "my recipe.yaml"
GIVEN = ("--output", "my runs", "--preset", "single_node_fsdp", "--devices", "1", "optimizer.lr=4e-3", "--seed", "7")
"""The recipe has another lr, no seed, and its own folder for runs."""


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Say:
    """Runs a command line in the folder of a recipe, and gives what it says."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    small.model_folder(tmp_path / "model")
    small.token_file(tmp_path / "train.jsonl", records=32)
    settings = small.recipe(tmp_path, name="mine", duration={"steps": 1}, log={"sinks": ["tensorboard"]})
    (tmp_path / NAME).write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()

    def run(line: str, code: int = 0) -> str:
        words = shlex.split(line)
        assert words[0] == "fullshard"
        result = CliRunner().invoke(app, words[1:], catch_exceptions=False)
        said = result.output + "".join(capfd.readouterr())
        assert result.exit_code == code, said
        return said

    return run


def after(label: str, said: str) -> str:
    """The rest of the line after a label, or the line after it."""
    found = re.search(rf"{re.escape(label)}\s+(.+)", said)
    assert found, said
    return found[1].strip()


def test_the_commands_that_a_run_prints(say: Say, tmp_path: Path) -> None:
    first = say(shlex.join(["fullshard", "train", NAME, *GIVEN]))
    run = tmp_path / "my runs" / "mine"
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"] == [1]

    # Another run, with everything that was given and two settings changed; in a real shell.
    line = after("Change a setting:", first)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    shown = subprocess.run(["bash", "-c", f"{line} --dry-run"], env=environment, capture_output=True, check=True).stdout
    there = yaml.safe_load(shown)
    assert (there["name"], there["optimizer"]["lr"], there["seed"]) == ("mine-2", 2e-3, 7)
    assert (there["output"], there["topology"]["devices"]) == ("my runs", 1)
    assert (
        there["sharding"]["activation_checkpointing"]
        == read_recipe(NAME, preset=GIVEN[3]).sharding.activation_checkpointing
    )

    logs = shlex.split(after("See the curves:", first))
    assert logs == ["tensorboard", "--logdir", "my runs/mine/logs"]
    assert list((tmp_path / logs[-1]).rglob("events.out.tfevents.*"))
    used: dict[str, Any] = {}
    exec(after("Use the model:", first), used)
    assert used["model"].config.vocab_size == small.VOCABULARY

    # The same command again: the commands that it prints continue this run, and start it over.
    second = say(shlex.join(["fullshard", "train", NAME, *GIVEN]))
    assert "my runs/mine is finished" in " ".join(second.split())
    say(after("Continue:\n", second))
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"] == [1, 2]
    say(after("not deleted):\n", second))
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"] == [1]
    assert (tmp_path / "my runs" / "mine.old-1").is_dir()


def test_the_printed_command_exports_a_model_that_was_not_exported(say: Say, tmp_path: Path) -> None:
    said = say(shlex.join(["fullshard", "train", NAME, "checkpoint.at_end=false", "log.sinks=[]"]))
    assert not (tmp_path / "runs" / "mine" / "model").exists()
    assert after("See the numbers:", said) == f"{tmp_path}/runs/mine/metrics.jsonl"
    assert "tensorboard" not in said.split("Next:")[1]
    say(after("Keep the model:", said))
    assert (tmp_path / "runs" / "mine" / "model" / "config.json").exists()


def test_the_command_that_a_check_prints(say: Say) -> None:
    said = say(shlex.join(["fullshard", "check", NAME, "--quick", *GIVEN, "--units"]))
    line = said.splitlines()[-1].strip()
    assert shlex.split(line)[:3] == ["fullshard", "train", NAME]
    assert "--quick" not in line
    assert "seed: 7" in say(f"{line} --dry-run")


def test_a_recipe_made_in_python_is_rerun_from_python(
    say: Say, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    execute(Reading(read_recipe(NAME), "", "a recipe in Python"), resume="auto")
    line = after("Change a setting:", capfd.readouterr().out)
    names: dict[str, Any] = {}
    exec(line.replace("fullshard.train(", "recipe = (", 1), names)
    assert (names["recipe"].name, names["recipe"].optimizer.lr) == ("mine-2", 5e-3)
    assert line.startswith("import fullshard; fullshard.train(fullshard.read('")


def test_settings_keep_their_place_and_are_replaced_once() -> None:
    typed = Typed(("fullshard", "train", "my recipe.yaml"), ("name=a", "data.train={kind: files}", "log.every-steps=2"))
    assert typed.again() == "fullshard train 'my recipe.yaml' name=a 'data.train={kind: files}' log.every-steps=2"
    changed = typed.again("name=b", "log.every_steps=5", "seed=1", resume="never")
    assert shlex.split(changed)[3:] == [
        "--resume",
        "never",
        "name=b",
        "data.train={kind: files}",
        "log.every_steps=5",
        "seed=1",
    ]


def test_ranks_know_the_command_line_of_the_run(say: Say, tmp_path: Path) -> None:
    typed = Typed(("fullshard", "train", NAME, "--devices", "2"), ("seed=3",))
    hand_on(read(NAME, "seed=3", typed=typed), tmp_path / "handed.yaml")
    assert read(tmp_path / "handed.yaml").typed == typed
    hand_on(Reading(read_recipe(NAME), "", "a recipe in Python"), tmp_path / "handed.yaml")
    assert read(tmp_path / "handed.yaml").typed is None


@pytest.mark.parametrize(
    ("environment", "starter"),
    [
        ({}, "fullshard train"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            "torchrun --standalone --nproc-per-node 2 -m fullshard train",
        ),
    ],
)
def test_under_a_single_node_launcher_the_command_names_it_and_its_ranks(
    say: Say, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], starter: str
) -> None:
    from fullshard.commands.recipe_arguments import RecipeArguments

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert rerun.command(RecipeArguments(NAME, ["seed=1"]).read()) == f"{starter} 'my recipe.yaml' seed=1"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("transformers.AutoModel.from_pretrained('a.b/c')", "import transformers; model = "),
        ("safetensors.torch.load_file('x')", "import safetensors.torch; model = "),
        ("torch.load('x', weights_only=True)", "import torch; model = "),
        (
            "peft.PeftModel.from_pretrained(diffusers.AutoModel.from_pretrained('b'), 'c')",
            "import peft, diffusers; model = ",
        ),
        (
            "pipeline = diffusers.DiffusionPipeline.from_pretrained('.'); pipeline.load_lora_weights('x')",
            "import diffusers; ",
        ),
    ],
)
def test_printed_python_lines_include_their_imports(line: str, expected: str) -> None:
    assert importing(line) == expected + line


def test_without_a_loader_no_python_line_is_printed(say: Say) -> None:
    from fullshard.contracts.model import Family

    assert Family.load_with(read_recipe(NAME).model, "out", adapter=False) is not None, "Transformers' own"
    assert Family.loader is None
