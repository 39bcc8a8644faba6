"""The guides: commands for several nodes are understood, and the objective of docs/own-parts.md trains."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import fullshard
from fullshard.cli import app
from fullshard.config.families import GROUP
from fullshard.config.part import decode
from fullshard.contracts.data import Encoder
from tests.docs.pages import ROOT, blocks, prose
from tests.small import model_folder, token_file

LAUNCHING = "".join((ROOT / "docs" / name).read_text() for name in ("launching.md", "restarts.md"))
OWN_PARTS = (ROOT / "docs" / "own-parts.md").read_text()
OWN_FAMILY = (ROOT / "docs" / "own-family.md").read_text()


def launches() -> list[str]:
    lines = [line.partition("  #")[0].strip() for block in blocks("bash", LAUNCHING) for line in block.splitlines()]
    return [line for line in lines if line.startswith("fullshard train")]


@pytest.mark.parametrize("line", launches())
def test_launching(line: str) -> None:
    """The command takes every word as an option of its own, not as a setting."""
    whole: Any = typer.main.get_command(app)
    words = shlex.split(line)
    given = whole.commands["train"].make_context("train", words[2:]).params
    assert (given["recipe"], list(given["settings"])) == ("recipe.yaml", [])
    for option, value in zip(words[3::2], words[4::2], strict=True):
        assert str(given[option.removeprefix("--").replace("-", "_")]) == value


def test_the_objective_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On packed rows, so that the proofs before step 1 look at it, too."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_parts.py").write_text(
        next(block for block in blocks("python", OWN_PARTS) if "(Objective)" in block)
    )
    model_folder(tmp_path / "model")
    token_file(tmp_path / "train.jsonl", records=24)
    settings = {
        "name": "smoothed",
        "output": str(tmp_path / "runs"),
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "train.jsonl"), "sequence_length": 64, "cache": str(tmp_path / "cache")},
        "duration": {"steps": 2},
        "batch": {"per_device": 2},
        "precision": "fp32",
        "topology": {"device": "cpu", "devices": 1},
        "log": {"sinks": []},
        **yaml.safe_load(blocks("yaml", OWN_PARTS)[0]),
    }
    result = fullshard.train(fullshard.read(settings))
    assert (result.step, result.stopped) == (2, "done")
    assert "proven" in (tmp_path / "runs" / "smoothed" / "log.txt").read_text()


def test_the_encoder_encodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to micro-batches; a tokenizer that knows three words will do."""
    monkeypatch.syspath_prepend(str(tmp_path))
    code = next(block for block in blocks("python", OWN_PARTS) if "(Encoder)" in block)
    (tmp_path / "my_encoder.py").write_text(code)
    words = {"one": 1, "two": 2, "three": 3}
    encoder = decode(Encoder, {"kind": "my_encoder.Reversed"}, where="data.encode")
    opened = encoder.open(lambda text: {"input_ids": [words[word] for word in text.split()]}, length=2)
    encoded = opened.encode({"text": "one two three"})
    assert [list(sample["input_ids"]) for sample in encoded.samples] == [[3, 2]]
    assert encoded.truncated == 1
    batch = encoder.collate(encoded.samples, length=None)
    assert (batch["input_ids"].tolist(), batch["labels"].tolist()) == ([[3, 2]], [[2, 1]])


def test_every_recipe_decodes() -> None:
    first, *others = [yaml.safe_load(block) for block in blocks("yaml", (ROOT / "docs" / "recipes.md").read_text())]
    assert others
    for sections in (first, *others):
        fullshard.read(first | sections)


def test_every_contract_is_listed() -> None:
    named = set(re.findall(r"`fullshard\.(\w+)`", prose(OWN_PARTS)))
    assert named == {
        "Encoder",
        "Evaluation",
        "Family",
        "Launcher",
        "Objective",
        "Optimizer",
        "Schedule",
        "SimilarityLoss",
        "Sink",
        "Source",
    }


def test_the_entry_point_group_and_folders_are_real() -> None:
    assert f'[project.entry-points."{GROUP}"]' in OWN_FAMILY
    named = re.findall(r"^  (\w+)/ ", blocks("text", OWN_FAMILY)[0], flags=re.MULTILINE)
    families = Path(fullshard.__file__).parent / "families"
    assert set(named) == {"models", "objectives", "encoders", "sources", "evaluations", "commands", "recipes"}
    assert all(list(families.glob(f"*/{name}")) for name in named)
