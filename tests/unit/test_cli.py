from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fullshard.cli
import fullshard.run
from fullshard.cli import app, main
from fullshard.commands.group import ELSEWHERE
from fullshard.commands.recipes import sentence
from fullshard.config import families
from fullshard.contracts.launcher import Ranks
from fullshard.dialects.command_line import to_overrides
from fullshard.errors import NumericalError, RecipeError
from fullshard.recipes.read import Reading

RECIPE = "model: some/model\ndata: {train: a.jsonl}\ntopology: {device: cpu}\n"
SHARED = ("--devices", "--gpus", "--nodes", "--node-rank", "--master", "--preset", "--output")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # several nodes set it
    Path("r.yaml").write_text(RECIPE)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Reading, dict[str, Any]]]:
    """What the command asked the library to do, instead of doing it."""
    found: list[tuple[str, Reading, dict[str, Any]]] = []

    def answer(module: Any, name: str, result: Any) -> None:
        def call(reading: Reading, **keywords: Any) -> Any:
            found.append((name, reading, keywords))
            return result

        monkeypatch.setattr(module, name, call)

    answer(fullshard.run, "train", 0)
    answer(fullshard.run, "join", 0)
    answer(fullshard.cli, "describe", "the plan")
    return found


def call(*words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def shell(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "fullshard", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environ})


# train


def test_train_starts_ranks(calls: Any) -> None:
    call("train", "r.yaml")
    [(name, reading, keywords)] = calls
    assert (name, reading.source, keywords["resume"]) == ("train", "r.yaml", "auto")
    assert keywords["ranks"] == Ranks(per_node=1)


def test_options_become_settings(calls: Any) -> None:
    call("train", "r.yaml", "--devices", "3", "--output", "1e3", "--resume", "never", "--preset", "single_node_fsdp")
    [(_, reading, keywords)] = calls
    assert (reading.recipe.topology.devices, str(reading.recipe.output)) == (3, "1e3")
    assert (keywords["ranks"].per_node, keywords["resume"]) == (3, "never")
    assert "topology.devices: 3 (command line) over 8 (preset single_node_fsdp)" in reading.overridden


def test_several_nodes(calls: Any) -> None:
    words = ["train", "r.yaml", "--devices=2", "--num-nodes=2", "--node-rank=1", "--master=127.0.0.1:29500"]
    call(*words)
    assert calls[0][2]["ranks"] == Ranks(2, 2, 1, "127.0.0.1:29500")


def test_a_cluster_that_sets_rank_to_the_node_number(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    call("train", "r.yaml", "--devices=2", "--nodes=2", "--node-rank=1", "--master=127.0.0.1:29500")
    assert calls[0][0] == "train"
    assert "RANK" not in os.environ


def test_under_a_launcher_the_command_joins_as_a_rank(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    values = ("1", "2", "1", "2", "127.0.0.1", "29500")
    for name, value in zip(LAUNCHER_VARIABLES, values, strict=True):
        monkeypatch.setenv(name, value)
    call("train", "r.yaml", "--resume", "some/checkpoint")
    assert (calls[0][0], calls[0][2]) == ("join", {"resume": "some/checkpoint", "anyway": False})
    call("train", "r.yaml", "--resume-anyway")
    assert (calls[1][0], calls[1][2]) == ("join", {"resume": "auto", "anyway": True})
    result = call("train", "r.yaml", "--node-rank=1", code=2)
    assert "this process was started by torchrun as rank 1 of 2. Leave these options out." in result.stderr


def test_resume_as_other_scripts_spell_it(calls: Any) -> None:
    for value, meaning in {"True": "auto", "False": "never", "some/checkpoint": "some/checkpoint"}.items():
        call("train", "r.yaml", "--resume_from_checkpoint", value)
        assert calls[-1][2]["resume"] == meaning


def test_dry_run_starts_nothing(calls: Any) -> None:
    assert call("train", "r.yaml", "--dry-run", "--devices=4").stdout == "the plan\n"
    assert [(name, keywords["ranks"].per_node) for name, _, keywords in calls] == [("describe", 4)]


@pytest.mark.parametrize("code", [0, 2, 3, 75, 1])
def test_the_command_exits_with_the_code_of_the_run(calls: Any, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(fullshard.run, "train", lambda *_, **__: code)
    call("train", "r.yaml", code=code)


def test_errors_have_their_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> int:
        raise NumericalError("loss is nan")

    monkeypatch.setattr(fullshard.run, "train", stop)
    assert call("train", "r.yaml", code=3).stderr == "Error: loss is nan\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(fullshard.run, "train", stop)
    with pytest.raises(ZeroDivisionError):
        call("train", "r.yaml")


# Settings on the command line


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        (["optimizer.lr=3e-4"], ["optimizer.lr=3e-4"]),
        (["--optimizer.lr=3e-4"], ["optimizer.lr=3e-4"]),
        (["--optimizer.lr", "3e-4", "seed=1"], ["optimizer.lr=3e-4", "seed=1"]),
        (["--seed", "1"], ["seed=1"]),
        (["--batch.per-device", "2"], ["batch.per_device=2"]),
        (["--sharding.cpu-offload"], ["sharding.cpu_offload=true"]),
        (["--sharding.cpu-offload", "seed=1"], ["sharding.cpu_offload=true", "seed=1"]),
        (["--sharding.cpu-offload", "False"], ["sharding.cpu_offload=False"]),
        (["--no-sharding.cpu-offload", "--seed=1"], ["sharding.cpu_offload=false", "seed=1"]),
        (["--fp16"], ["precision=fp16"]),
        (["--fp16", "True"], ["precision=fp16"]),
        (["--fp16", "False"], ["precision=fp32"]),
        (["--no-fp16"], ["precision=fp32"]),
        (["--bf16"], ["precision=bf16"]),
        (["--schedule.floor", "-1"], ["schedule.floor=-1"]),
        (["--log.sinks[0].project=x"], ["log.sinks[0].project=x"]),
    ],
)
def test_settings_in_every_spelling(words: list[str], overrides: list[str]) -> None:
    sections = ["seed", "optimizer", "batch", "sharding", "schedule", "log", "precision"]
    assert to_overrides(words, sections=sections, options=["--devices"]) == overrides


@pytest.mark.parametrize(
    "words", [["--seed", "7"], ["--seed=7"], ["seed=7"], ["seed=7", "--fp16"], ["--fp16", "--seed", "7"]]
)
def test_settings_reach_the_recipe(calls: Any, words: list[str]) -> None:
    call("train", "r.yaml", *words)
    recipe = calls[0][1].recipe
    assert recipe.seed == 7
    assert recipe.precision == ("fp16" if "--fp16" in words else "auto")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "4"], "--device 4: a number of ranks is --devices 4; device is auto, cuda or cpu."),
        (["--devcies", "4"], "--devcies is neither an option nor a key of the recipe. Did you mean --devices?"),
        (["--optimzer.lr", "1"], "Did you mean --optimizer.KEY?"),
        (["lr"], "'lr' on the command line is not a setting"),
        (["--devices=2", "topology.devices=3"], "--devices 2 and topology.devices=3 on the command line both set"),
        (["--devices=2", "--gpus=0,1"], "both set topology.devices"),
        (["seed=1", "--seed", "2"], "seed=1 and seed=2 on the command line both set seed"),
        (["--gpus=0,1"], "names GPUs, but this run is on the CPU"),
        (["--devices=many"], "is not a count, a list of ids (0,2) or auto"),
        (["--devices=0"], "topology.devices must be at least 1"),
        (["--nodes=2"], "--nodes 2 needs a place where the nodes meet"),
        (["--node-rank=1"], "--node-rank 1 does not exist"),
        (["--preset=nope"], "preset 'nope' is not known"),
        (["optimizer.lrr=1"], "command line: optimizer.lrr is not a known key (did you mean 'lr'?)"),
    ],
)
def test_mistakes_end_with_code_2_and_no_traceback(calls: Any, words: list[str], message: str) -> None:
    result = call("train", "r.yaml", *words, code=2)
    assert message in result.stderr
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.output
    assert calls == []


def test_settings_before_the_recipe_are_explained(calls: Any) -> None:
    assert "Write: fullshard train RECIPE --seed=3" in call("train", "--seed=3", "r.yaml", code=2).stderr


def test_an_unknown_word_is_neither_an_option_nor_a_key() -> None:
    with pytest.raises(RecipeError, match="neither an option nor a key"):
        to_overrides(["--nothing"], sections=["seed"], options=["--devices"])


# Listing


def test_recipes_without_arguments_lists_them() -> None:
    lines = call("recipes").stdout
    assert lines == call("recipes", "list").stdout
    for name, path in families.recipes().items():
        assert f"{name} " in lines
        assert sentence(path) in lines


def test_presets_lists_what_each_is_for() -> None:
    lines = call("presets").stdout
    for name in ("single_node_fsdp", "multi_node_fsdp", "large_scale_fsdp", "multi_node_ddp"):
        assert f"{name} " in lines


def test_show_and_copy() -> None:
    text = families.recipes()["sft"].read_text()
    assert call("recipes", "show", "sft").stdout == text
    assert "fullshard train sft.yaml" in call("recipes", "copy", "sft").stdout
    assert Path("sft.yaml").read_text() == text
    Path("sft.yaml").write_text("mine")
    assert "sft.yaml exists and will not be overwritten" in call("recipes", "copy", "sft", code=2).stderr
    assert Path("sft.yaml").read_text() == "mine"
    Path("folder").mkdir()
    call("recipes", "copy", "sft", "folder")
    assert Path("folder/sft.yaml").read_text() == text
    assert "cannot be written" in call("recipes", "copy", "sft", "no/such/folder/x.yaml", code=2).stderr


def test_an_unknown_recipe_suggests_the_nearest() -> None:
    message = call("recipes", "show", "quikstart", code=2).stderr
    assert "'quikstart' is not a built-in recipe (did you mean 'quickstart'?)" in message
    assert "Did you mean quickstart?" in call("train", "quikstart", code=2).stderr


def test_schema_is_json() -> None:
    assert json.loads(call("recipes", "schema").stdout)["title"] == "fullshard recipe"


# The real command


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["recipes"], ["presets"], ["--version"]])
def test_light_commands_do_not_import_torch(words: list[str]) -> None:
    code = (
        f"import sys\nsys.argv = {['fullshard', *words]!r}\nfrom fullshard.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("command", ["train", "check", "prove"])
def test_an_unknown_option_is_answered_with_the_options_of_the_help(command: str) -> None:
    said = call(command, "r.yaml", "--no-such-option", code=2).output
    listed = re.search(r"Options: (.*?)\. Keys", " ".join(said.split()))
    assert listed is not None
    shown = re.findall(r"^  (--[a-z-]+)", call(command, "--help").stdout, flags=re.MULTILINE)
    assert listed[1].split(", ") == [option for option in shown if option != "--help"]


def test_help_names_every_option_and_exit_code() -> None:
    text = call("train", "--help").stdout
    for word in (*SHARED, "--resume", "--resume-anyway", "--dry-run", "--fp16", "RECIPE", "KEY=VALUE", "75"):
        assert word in text
    text = call("check", "--help").stdout
    for word in (*SHARED, "--resume", "--resume-anyway", "--quick", "--units", "--json", "KEY=VALUE", "Exit codes"):
        assert word in text


def test_python_m_fullshard_reports_a_mistake() -> None:
    done = shell("train", "nope.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: nope.yaml is neither a file nor a built-in recipe.")
    assert "Traceback" not in done.stderr


def test_shell_completion_offers_recipes_and_presets() -> None:
    def completed(words: str) -> str:
        return shell(_FULLSHARD_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" "))).stdout

    assert "quickstart" in completed("fullshard train qui")
    assert "r.yaml" in completed("fullshard train r")
    assert "multi_node_ddp" in completed("fullshard train quickstart --preset multi")
    assert "train" in completed("fullshard tr")


def test_a_rank_ends_with_its_launcher_and_its_children_do_not_inherit_that(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[int] = []
    monkeypatch.setattr("fullshard.launch.signals.end_with", followed.append)
    monkeypatch.setattr(sys, "argv", ["fullshard", "--version"])
    monkeypatch.setenv("FULLSHARD_STARTED_BY", "12")
    for _ in range(2):
        with pytest.raises(SystemExit):
            main()
    assert followed == [12]


@pytest.mark.parametrize(
    "command", ["train", "check", "prove", "verify", "explain", "export", "evaluate", "generate", "mine", "sample"]
)
def test_help_shows_no_python_types(command: str) -> None:
    said = CliRunner().invoke(app, [command, "--help"]).output
    assert "Usage" in said
    assert not re.search(r"<(?!image>|audio>)\w+>|list\[|\bNone\b|\bTrue\b|\bFalse\b", said)


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_commands_of_other_tools_point_to_what_does_the_same(name: str) -> None:
    result = call(name, "runs/some", "--option", code=2)
    meant = ELSEWHERE[name]
    assert f"there is no command {name!r}. Use: {meant}" in result.output
    assert meant.split()[1] in app_commands(), "it is a command"


def test_other_unknown_commands_are_refused() -> None:
    assert "No such command 'nonsense'" in call("nonsense", code=2).output


def app_commands() -> set[str]:
    return {found.name or str(getattr(found.callback, "__name__", "")) for found in app.registered_commands}
