"""docs/stages.md: its recipe trains, its commands run as written, and the folder looks as it says."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from tests.docs.pages import ROOT, blocks

PAGE = (ROOT / "docs" / "stages.md").read_text()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the recipe of the page and the data that it names."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(blocks("yaml", PAGE)[0])
    texts = [{"text": f"{n} and {n} make {2 * n}. " * 6} for n in range(40)]
    pairs = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}."} for n in range(40)]
    for name, rows in (("texts.jsonl", texts), ("pairs.jsonl", pairs)):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def call(line: str, monkeypatch: pytest.MonkeyPatch) -> str:
    words = shlex.split(line.partition("  #")[0])
    monkeypatch.setattr(sys, "argv", words)
    done = CliRunner().invoke(app, words[1:], catch_exceptions=False)
    assert done.exit_code == 0, f"{line}\n{done.output}"
    return done.output


@pytest.mark.slow  # trains four short runs, and loads their models
def test_its_commands_run(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for line in blocks("bash", PAGE)[0].splitlines():
        call(line, monkeypatch)
    run = Path("runs/my-model")
    drawn = re.findall(r"^  (\w+)/? ", blocks("text", PAGE)[0], flags=re.MULTILINE)
    assert {path.name for path in run.iterdir() if not re.search(r"^\.|old", path.name)} == {*drawn, "best", "last"}
    assert (run / "model").readlink().as_posix() == "sft/model"
    records = [json.loads(line) for line in (run / "sft" / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["kind"] == "train"][-1]
    assert (last["stage"], last["step"], last["total_step"]) == ("sft", 3, 7)


def test_its_recipe_is_what_the_page_says(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fullshard

    warmup, sft = fullshard.read("recipe.yaml").stages or []
    assert (str(warmup.folder), str(sft.folder)) == ("runs/my-model/warmup", "runs/my-model/sft")
    assert sft.start is not None
    assert (sft.start.source, sft.start.weights) == ("runs/my-model/warmup", "best")
    assert call("fullshard train recipe.yaml --dry-run", monkeypatch).splitlines()[-1] == (
        "# all stages: 7 steps = 4 (warmup) + 3 (sft)"
    )


@pytest.mark.slow
def test_its_python_trains(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    exec(blocks("python", PAGE)[0], {})
    assert capsys.readouterr().out.splitlines()[-1].startswith("3 runs/my-model/sft ")
