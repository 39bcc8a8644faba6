"""The page for those who come from another trainer: its tables are those of the dialects, and what it shows works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.dialects.tables import dialects
from fullshard.recipes.read import read
from tests.docs.coming_from import PAGE, with_tables
from tests.docs.pages import blocks
from tests.small import model_folder, token_file


def test_the_tables_are_those_of_the_dialects() -> None:
    assert with_tables(PAGE.read_text()) == PAGE.read_text(), "run: python -m tests.docs.coming_from"


def test_every_dialect_has_its_section() -> None:
    text = PAGE.read_text()
    assert set(re.findall(r"<!-- table: (\w+) -->", text)) == set(dialects())
    for dialect in dialects().values():
        assert f"\n## {dialect.title}\n" in text
        assert dialect.intro


def test_the_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "model")
    token_file(tmp_path / "train.jsonl", records=40)
    text = PAGE.read_text()
    for block in blocks("yaml", text):
        (tmp_path / block.split()[1]).write_text(block)
    train, imported, check = (shlex.split(line, comments=True)[1:] for line in blocks("bash", text)[0].splitlines())
    shown = CliRunner().invoke(app, [*train, "--dry-run", "topology.device=cpu"])
    assert shown.exit_code == 0, shown.output
    for line in ("strategy: grad_op", "devices: 2", "lr: 0.0002", "name: first", "has no effect: FSDP2 always keeps"):
        assert line in shown.output
    written = CliRunner().invoke(app, imported)
    assert written.exit_code == 0, written.output
    assert f"Check it with: fullshard {' '.join(check)}" in written.output
    direct = read("train.yaml", launch_file="accelerate.yaml").recipe
    assert read("recipe.yaml").recipe == direct
    for verdict in ("kept", "renamed", "default", "no effect"):
        assert f"| {verdict} |" in text
        assert verdict == "kept" or f"  {verdict}" in written.output


def test_words_that_the_page_names_are_understood() -> None:
    base = {"model": "m", "data": {"train": "d"}}
    settings = ("sharding=FULL_SHARD", "sharding.strategy=zero3", "sharding.activation_checkpointing=true")
    for setting in (*settings, "schedule=none", "optimizer=adamw_torch"):
        read(base, setting)
        assert setting in PAGE.read_text() or setting.replace("=", ": ") in PAGE.read_text()
