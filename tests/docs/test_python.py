"""docs/python.md: its code runs as written, and its table names what a result has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedModel

import fullshard
from fullshard.dist import world as worlds
from tests.docs.pages import ROOT, blocks
from tests.small import model_folder, recipe, token_file

PAGE = (ROOT / "docs" / "python.md").read_text()


def test_the_code_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path / "model")
    token_file(tmp_path / "train.jsonl", records=40)
    settings = recipe(tmp_path, duration={"steps": 2}, topology={"devices": 1}) | {"output": "runs"}
    settings["data"]["holdout"] = 0.2
    settings |= {"evaluate": {"parts": ["loss"]}, "checkpoint": {"best": "loss"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    try:
        for block in blocks("python", PAGE):
            exec(block, names)
    finally:
        worlds.leave(at_exit=True)
    assert isinstance(names["module"], PreTrainedModel)
    assert names["trainer"].folder == "runs/second"
    assert fullshard.load("runs/mine", model=names["plain"])["step"] == 4


def test_the_table_names_what_a_result_has() -> None:
    table = PAGE.partition("## In a notebook")[0]
    named = {
        name
        for row in re.findall(r"^\| (`result\.[^|]*)\|", table, flags=re.MULTILINE)
        for name in re.findall(r"\w+", row)
    }
    missing = {name for name in named - {"result", "options"} if name not in dir(fullshard.Result) + FIELDS}
    assert not missing


FIELDS = list(fullshard.Result.__dataclass_fields__)
