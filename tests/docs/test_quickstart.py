"""The main job as the README shows it: the real command on the two ranks that it starts, the run folder it leaves, the
model in Transformers, and the life of the run after that: finished, again, over, further. One run serves all tests."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import fullshard
from fullshard.cli import app
from fullshard.log.metrics import read as read_metrics

README = (Path(__file__).parents[2] / "README.md").read_text()
pytestmark = pytest.mark.slow
SHORT = ("duration.epochs=1", "evaluate.every_steps=100")
"""A third of the run: enough for losses to fall."""
STEPS = 241  # of one epoch, as the README says


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that the command ran in, and what it printed."""
    place = tmp_path_factory.mktemp("quickstart")
    environ = {**os.environ, "FULLSHARD_CACHE": str(tmp_path_factory.getbasetemp() / "cache")}
    command = [sys.executable, "-m", "fullshard", "train", "quickstart", *SHORT]
    done = subprocess.run(command, cwd=place, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return place, done.stdout


@pytest.fixture
def run(finished: tuple[Path, str]) -> Path:
    return finished[0] / "runs" / "quickstart"


@pytest.fixture
def copy(finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished run to go on with, in the current folder."""
    shutil.copytree(finished[0] / "runs", tmp_path / "runs", symlinks=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def command(*words: str) -> str:
    """What `fullshard train quickstart` says, on one rank, in this process."""
    line = ["train", "quickstart", *SHORT[1:], "--devices", "1", *words]
    result = CliRunner().invoke(app, line, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def contents(folder: Path) -> dict[str, str]:
    """Every file but the lock, which says who used the folder last."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    files = [path for path in files if path.suffix != ".lock"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_it_prints_what_the_readme_promises(finished: tuple[Path, str]) -> None:
    for promised in (
        "fullshard: quickstart",
        "proven",
        "New Best Val Loss",
        "Sample continuation",
        "Training complete!",
    ):
        assert promised in finished[1]
    assert f"{STEPS} per epoch" in finished[1]
    assert f"x {STEPS} per epoch" in README
    assert re.search(r"Next:\n  1\. .*\n  2\. .*\n  3\. ", finished[1])


def test_the_header_is_the_one_in_the_readme(finished: tuple[Path, str]) -> None:
    """Up to what is in brackets, which may differ in a last digit; the steps are those of the whole recipe."""
    shown = README.partition("```text\nfullshard: quickstart\n")[2].partition("\n\n")[0].splitlines()
    assert len(shown) > 8
    for line in shown:
        if line.split()[0] != "steps":
            assert line.partition("(")[0].rstrip() in finished[1]


def test_losses_fall(run: Path) -> None:
    records = read_metrics(run / "metrics.jsonl")
    train = [record["loss"] for record in records if record["kind"] == "train"]
    validation = [record["loss"] for record in records if record["kind"] == "validation"]
    assert train[-1] < 0.75 * train[0]
    assert len(validation) == 3
    assert validation == sorted(validation, reverse=True)


def test_the_run_folder(run: Path) -> None:
    assert sorted(path.name for path in run.iterdir() if not path.name.startswith(".")) == [
        "best",
        "checkpoint-100",
        "checkpoint-200",
        "checkpoint-241",
        "last",
        "log.txt",
        "logs",
        "metrics.jsonl",
        "model",
        "recipe.resolved.yaml",
        "units.json",
    ]
    assert [os.readlink(run / pointer) for pointer in ("best", "last")] == ["checkpoint-241"] * 2
    assert list((run / "logs").rglob("events.out.tfevents.*"))
    manifest = json.loads((run / "last" / "manifest.json").read_text())
    for name, facts in manifest["files"].items():
        stored = (run / "last" / name).read_bytes()
        assert (len(stored), hashlib.sha256(stored).hexdigest()) == (facts["size_bytes"], facts["sha256"])
    units = json.loads((run / "units.json").read_text())["units"]
    assert {"class_name", "parameters", "storage", "compute", "reduce", "trainable_fraction", "tied"} <= units[0].keys()


def test_what_the_run_wrote_down(run: Path) -> None:
    records = read_metrics(run / "metrics.jsonl")
    trained = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in trained] == [1, 50, 100, 150, 200, STEPS]
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
    resolved = fullshard.read(run / "recipe.resolved.yaml")
    assert resolved.sharding.strategy != "auto"
    assert resolved.precision in ("bf16", "fp32")
    assert yaml.safe_load((run / "recipe.resolved.yaml").read_text())["run"]["versions"]["torch"]


def test_the_model_as_the_readme_loads_it(finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(finished[0])
    loaded: dict[str, Any] = {}
    exec(
        next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "AutoTokenizer" in block),
        loaded,
    )
    model, tokenizer = loaded["model"], loaded["tokenizer"]
    prompt = tokenizer("The for statement", return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert len(ids[0]) == len(prompt["input_ids"][0]) + 5
    assert tokenizer.decode(ids[0]).startswith("The for statement")


def test_running_it_again_says_that_it_is_finished(copy: Path) -> None:
    before = contents(copy)
    said = command(SHORT[0])
    assert f"runs/quickstart is finished: {STEPS} steps are done" in " ".join(said.split())
    given = f"fullshard train quickstart --devices 1{{}} {SHORT[1]} duration.epochs={{}}\n"
    assert given.format(" --resume never", 1) in said
    assert given.format("", 2) in said
    assert contents(copy) == before


def test_starting_over_keeps_the_old_run(copy: Path) -> None:
    before = contents(copy / "quickstart")
    said = " ".join(command("duration.steps=3", "log.every_steps=1", "--resume", "never").split())
    assert "the earlier run is kept in runs/quickstart.old-1" in said
    assert contents(copy / "quickstart.old-1") == before
    new = read_metrics(copy / "quickstart" / "metrics.jsonl")
    assert [record["step"] for record in new if record["kind"] == "train"] == [1, 2, 3]


def test_a_longer_duration_continues_from_the_checkpoint(copy: Path) -> None:
    before = (copy / "quickstart" / "metrics.jsonl").read_text().splitlines()
    said = " ".join(command(f"duration.steps={STEPS + 2}", "log.every_steps=1").split())
    assert f"Resuming from runs/quickstart/checkpoint-{STEPS}" in said
    after = (copy / "quickstart" / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in before if json.loads(line)["kind"] == "train"]
    found = [line for line in after if json.loads(line)["kind"] == "train"]
    assert found[: len(kept)] == kept
    assert [json.loads(line)["step"] for line in found[len(kept) :]] == [STEPS + 1, STEPS + 2]
    assert os.readlink(copy / "quickstart" / "last") == f"checkpoint-{STEPS + 2}"
