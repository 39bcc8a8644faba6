"""docs/ray.md: its commands run, its output is what they print, its options exist. tests/submit has a real Ray, which
runs the code of the page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.submit import ray as on_ray
from tests.docs.pages import ROOT, blocks
from tests.small import model_folder, token_file

PAGE = (ROOT / "docs" / "ray.md").read_text()
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in blocks("bash", PAGE)
    for line in block.splitlines()
    if line.startswith("fullshard ")
]
AT = ["--address", "http://127.0.0.1:8265"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "model", num_hidden_layers=1)
    token_file(tmp_path / "train.jsonl", records=8)
    (tmp_path / "recipe.yaml").write_text(
        "{name: my-model, model: {path: model}, data: {train: train.jsonl, sequence_length: 64}}"
    )
    (tmp_path / "bin").mkdir()
    words = f'for word in "$@"; do echo "$word"; done > {tmp_path}/words'
    (tmp_path / "bin" / "ray").write_text(f"#!/bin/sh\n{words}\necho Job raysubmit_42 submitted\n")
    (tmp_path / "bin" / "ray").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    return tmp_path


def submit(*words: str) -> Any:
    return CliRunner().invoke(app, ["submit", "recipe.yaml", "--on", "ray", "--no-check", *words])


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, folder: Path) -> None:
    done: Any = CliRunner().invoke(app, shlex.split(command)[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    if "--dry-run" not in command and "--help-on" not in command:
        said = re.sub("ray job submit --address.*", "ray job submit ...", done.stdout)
        assert said.replace(str(folder), "/home/me") == blocks("text", PAGE)[0]
        words = (folder / "words").read_text().splitlines()
        assert words[:5] == ["job", "submit", *AT, "--no-wait"]
        assert words[-1] == str(folder / "runs" / "my-model" / "submit-1" / "driver.py")
        compile(Path(words[-1]).read_text(), "driver.py", "exec")


def test_options_exist() -> None:
    table = re.findall(r"^\| `--([\w-]+)", PAGE, flags=re.MULTILINE)
    assert {name.replace("-", "_") for name in table} == {*on_ray.Ray.model_fields, "restarts"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*AT, "--workers", "2"], "topology.device = auto, and this machine does not know the cluster"),
        ([*AT, "topology.device=cpu"], "topology.devices = auto does not say how many workers to ask Ray for"),
        (["--workers", "0"], "--workers '0': it must be at least 1"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(folder: Path, words: list[str], message: str) -> None:
    done = submit(*words)
    assert (done.exit_code, (folder / "runs").exists()) == (2, False)
    assert message in " ".join(done.output.split())


def test_a_missing_package_gives_the_line_that_installs_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "find_spec", lambda name: None)
    done = submit("--workers", "1")
    assert done.exit_code == 2
    assert "pip install 'fullshard[ray]'" in " ".join(done.output.split())


def test_workers_and_gpus_of_the_driver(folder: Path) -> None:
    done = submit(*AT, "--nodes", "2", "--devices", "4", "--cpus", "3", "topology.device=cuda", "--dry-run")
    assert "num_workers=8, use_gpu=True, resources_per_worker={'CPU': 3, 'GPU': 1}" in done.output
    assert "TorchConfig(backend='cpu:gloo,cuda:nccl')" in done.output
