"""A test per row of rows.yaml: what can be run is run, and every test and page that a row names exists."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fullshard
import fullshard.run
from fullshard.cli import app
from fullshard.config.part import plain
from fullshard.recipes.read import Reading, read
from tests.docs.pages import anchors
from tests.rows import page
from tests.rows.rows import COUNTS, FILES, ROOT, ROWS, SHOWN_BY_RUNNING, listed
from tests.small import model_folder, token_file

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rows_with(key: str) -> list[str]:
    return [name for name, row in ROWS.items() if key in row]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the files that rows name."""
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for file in FILES.iterdir():
        shutil.copy(file, tmp_path)
    return tmp_path


Train = Callable[[str], Reading | str]


@pytest.fixture
def train(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Reads the words after `fullshard train`; gives what would be trained, or the error."""
    found: list[Reading] = []

    def remember(reading: Reading, **_: Any) -> int:
        found.append(reading)
        return 0

    monkeypatch.setattr(fullshard.run, "train", remember)

    def run(words: str) -> Reading | str:
        result = CliRunner().invoke(app, ["train", *shlex.split(words)], catch_exceptions=False)
        if found:
            return found.pop()
        assert result.exit_code == 2, result.output
        return " ".join(result.output.split())

    return run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One short run: two epochs of two steps, validated and saved after each."""
    inputs = tmp_path_factory.mktemp("rows")
    model_folder(inputs / "model")
    token_file(inputs / "train.jsonl", records=32)
    token_file(inputs / "validation.jsonl", records=8)
    settings = {
        "name": "rows",
        "output": str(inputs / "runs"),
        "model": {"path": str(inputs / "model")},
        "data": {
            "train": str(inputs / "train.jsonl"),
            "validation": str(inputs / "validation.jsonl"),
            "sequence_length": 64,
            "pack": False,
        },
        "batch": {"per_device": 16},
        "duration": {"epochs": 2},
        "optimizer": {"lr": 1e-3},
        "precision": "fp32",
        "topology": {"device": "cpu", "devices": 1},
        "log": {"every_steps": 1},
    }
    result = fullshard.train(fullshard.read(settings))
    assert result.step == 4
    return inputs / "runs" / "rows"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What a command prints; each is run once."""
    here = tmp_path_factory.mktemp("commands")

    @functools.cache
    def run(words: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(here)
            result = CliRunner().invoke(app, shlex.split(words), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    return run


def value_at(settings: Any, path: str) -> Any:
    """The value at a key path such as log.sinks[0].kind."""
    for key in re.findall(r"[\w@]+", path):
        settings = settings[int(key)] if isinstance(settings, list) else settings[key] if settings else None
    return settings


def check_settings(reading: Reading | str, row: dict[str, Any]) -> None:
    if "fails" in row:
        assert isinstance(reading, str), "it was expected to be refused"
        assert row["fails"] in reading
        return
    assert isinstance(reading, Reading), reading
    settings = plain(reading.recipe)
    found = {key: value_at(settings, key) for key in row["gives"]}
    assert found == row["gives"]


def test_every_row_of_the_documents_is_here() -> None:
    assert list(ROWS) == [f"{name}-{number}" for name, count in COUNTS.items() for number in range(1, count + 1)]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_what_answers_it(name: str) -> None:
    row = ROWS[name]
    assert row["state"] in page.STATES
    assert row["asks"]
    assert row["answer"]
    assert any(key in row for key in (*SHOWN_BY_RUNNING, "see"))
    for key, needs in {"train": ("gives", "fails"), "file": ("gives",), "command": ("says",)}.items():
        assert key not in row or any(need in row for need in needs)
    if row["kind"] in ("flag", "key", "preset", "log line", "layout", "strategy"):
        assert any(key in row for key in SHOWN_BY_RUNNING), "this kind of row is run, not only referred to"


@pytest.mark.parametrize("name", rows_with("train"))
def test_the_command_line_of(name: str, train: Train) -> None:
    check_settings(train(ROWS[name]["train"]), ROWS[name])


@pytest.mark.parametrize("name", rows_with("file"))
def test_the_file_of(name: str, folder: Path) -> None:
    before = (folder / ROWS[name]["file"]).read_bytes()
    check_settings(read(ROWS[name]["file"]), ROWS[name])
    assert (folder / ROWS[name]["file"]).read_bytes() == before


@pytest.mark.parametrize("name", rows_with("log"))
def test_the_log_of_a_run_shows(name: str, run_folder: Path) -> None:
    lines = [line.partition("  ")[2] for line in (run_folder / "log.txt").read_text(encoding="utf-8").splitlines()]
    for pattern in listed(ROWS[name]["log"]):
        assert any(re.search(pattern, line) for line in lines), f"{pattern} in\n" + "\n".join(lines)


@pytest.mark.parametrize("name", rows_with("folder"))
def test_the_folder_of_a_run_holds(name: str, run_folder: Path) -> None:
    for path in ROWS[name]["folder"]:
        assert (run_folder / path).exists(), sorted(p.name for p in run_folder.iterdir())


@pytest.mark.parametrize("name", rows_with("command"))
def test_a_command_says(name: str, outputs: Callable[[str], str]) -> None:
    said = outputs(ROWS[name]["command"])
    for text in listed(ROWS[name]["says"]):
        assert text in said or text in " ".join(said.split())


@pytest.mark.parametrize("name", rows_with("explain"))
def test_an_error_is_explained(name: str, outputs: Callable[[str], str]) -> None:
    row = ROWS[name]["explain"]
    assert f"({row['entry']})" in outputs(shlex.join(["explain", row["text"]]))


@pytest.mark.parametrize("name", rows_with("see"))
def test_what_is_named_exists(name: str) -> None:
    for target in ROWS[name]["see"]:
        path, _, test = target.partition("::")
        path, _, anchor = path.partition("#")
        assert (ROOT / path).exists(), target
        if test:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, target
        if anchor:
            assert anchor in anchors((ROOT / path).read_text(encoding="utf-8")), target


def test_the_page_is_what_the_rows_say() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run python -m tests.rows.page"
