"""The run folder belongs to one run, and unwritable paths are reported without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fullshard.errors import CheckpointError, SetupError
from fullshard.hf.tokenizers.tokenizer import TokenizerTraining, train_tokenizer
from tests import small

HOLD = """
import sys
from pathlib import Path
from fullshard.checkpoint.folder import claim
lock = claim(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    small.model_folder(folder / "model")
    small.token_file(folder / "train.jsonl", records=32)
    return folder


@pytest.fixture
def settings(folder: Path) -> dict[str, Any]:
    return small.recipe(folder, duration={"steps": 1}, checkpoint={"at_end": False})


@pytest.fixture
def held(folder: Path) -> Iterator[int]:
    """Another process has the run folder."""
    (folder / "runs").mkdir(exist_ok=True)
    command = [sys.executable, "-c", HOLD, str(folder / "runs" / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        yield other.pid
        other.kill()


def test_a_run_folder_in_use_is_refused(held: int, settings: dict[str, Any], folder: Path) -> None:
    (folder / "runs" / "run").mkdir(exist_ok=True)
    (folder / "runs" / "run" / "kept.txt").write_text("of the other run")
    for resume in ("auto", "never"):
        with pytest.raises(CheckpointError, match=f"runs/run is in use by process {held} on "):
            small.train(settings, resume)
    assert sorted(os.listdir(folder / "runs")) == [".run.lock", "run"]
    assert os.listdir(folder / "runs" / "run") == ["kept.txt"]


def test_the_folder_is_free_again_after_a_run_and_after_an_error(settings: dict[str, Any], folder: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        small.train(settings, "nowhere")
    assert small.train(settings, "never")
    claim = [sys.executable, "-c", HOLD, str(folder / "runs" / "run")]
    assert subprocess.run(claim, input="", capture_output=True, text=True, check=True).stdout == "held\n"


def test_an_output_that_cannot_be_written_is_named(settings: dict[str, Any], folder: Path) -> None:
    settings["output"] = str(folder / "train.jsonl")
    with pytest.raises(SetupError, match=r"output = '.*train.jsonl': .*\(Not a directory\)\. Choose a folder"):
        small.train(settings)
    (folder / "other").mkdir()
    (folder / "other" / "run").write_text("a file where the run folder should be")
    settings["output"] = str(folder / "other")
    with pytest.raises(SetupError, match=r"other/run is a file where the run folder must be: .*name=NAME"):
        small.train(settings)


def test_a_cache_that_cannot_be_written_is_named(folder: Path) -> None:
    place = TokenizerTraining(vocab_size=300).folder(folder / "train.jsonl", "abc")
    with pytest.raises(SetupError, match="cannot be kept here: .*Set data.cache or the variable FULLSHARD_CACHE"):
        train_tokenizer(["text"], TokenizerTraining(vocab_size=300), folder=place)
