"""The commands of README and docs, run as written and in their order, in a folder with a small model and data."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.config.part import kinds
from fullshard.submit.engine import Engine

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GUIDES = [(ROOT / "docs" / name).read_text() for name in ("checkpoints.md", "recipes.md", "hangs.md")]


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def commands() -> list[str]:
    lines = "\n".join(block for text in (README, *GUIDES) for block in blocks("bash", text)).splitlines()
    found = [line.partition("#")[0].strip() for line in lines if line.startswith("fullshard")]
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The README's recipe beside the files it names; the hub model is a small local one."""
    from tests.small import model_folder

    path = tmp_path_factory.mktemp("readme")
    model_folder(path / "Qwen" / "Qwen3-8B", vocab_size=1200, max_position_embeddings=1024)
    _tokenizer(path / "Qwen" / "Qwen3-8B")
    pairs = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}."} for n in range(12)]
    for name in ("train", "validation"):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (path / "recipe.yaml").write_text(blocks("yaml")[0])
    (path / "axolotl.yaml").write_text(
        "base_model: Qwen/Qwen3-8B\ndatasets: [{path: train.jsonl}]\nlearning_rate: 1e-4\n"
    )
    return path


def _tokenizer(folder: Path) -> None:
    from pydoc_data.topics import topics

    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(topics.values(), vocab_size=1000, special_tokens=["<|end|>"], show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|end|>").save_pretrained(folder)


@pytest.mark.parametrize("command", commands())
def test_commands_run_as_written(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, which starts ranks where the command does; the quickstart runs as a process of its own, and the
    trial of a check, which takes as long as training here, in tests/check."""
    words = [*shlex.split(command), *(["--quick"] if " check " in command else [])]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", words)
    result = CliRunner().invoke(app, words[1:], catch_exceptions=False)
    said = result.output + capfd.readouterr().out  # of ranks that it started
    assert result.exit_code == 0, said
    if words[1] == "train" and "--dry-run" not in words:
        name = "second" if "name=second" in words else "my-model"
        assert "Training complete!" in said
        assert (folder / "runs" / name / "model" / "adapter_model.safetensors").exists()


def test_the_lines_that_install_name_what_the_package_needs_and_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    line = next(line for line in blocks("bash")[1].splitlines() if "torch" in line)
    assert next(wanted for wanted in project["dependencies"] if wanted.startswith("torch>")) in line
    extras = re.search(r"pip install '\.\[(.*)\]'", blocks("bash")[1])
    assert extras
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])


def test_the_recipe_is_at_most_ten_keys() -> None:
    recipe = yaml.safe_load(blocks("yaml")[0])
    assert sum(len(value) if isinstance(value, dict) else 1 for value in recipe.values()) <= 10


def test_python_from_the_readme(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    exec(next(block for block in blocks("python") if "fullshard.train" in block), {})
    assert capsys.readouterr().out.strip().endswith("runs/my-model")


def test_make_targets_are_the_two_commands() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "fullshard train quickstart" in makefile
    assert re.findall(r"make (\w+)", blocks("bash")[0]) == ["quickstart", "test"]
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].keys() - {"test", "check", "docs"}
    listed = README.partition("\nExtras: ")[2].partition("\n\n")[0]
    assert set(re.findall(r"fullshard\[(\w+)\]", listed)) == extras


def test_pages_install_from_the_folder() -> None:
    """No package index has fullshard."""
    pages = [path for path in (ROOT / "docs").glob("*.md") if path.name != "troubleshooting.md"]
    for path in [ROOT / "README.md", *pages]:
        assert not re.findall(r"pip install '?fullshard.*", path.read_text()), path.name


def test_every_engine_is_named() -> None:
    row = next(line for line in README.splitlines() if line.startswith("| launching |"))
    for engine in kinds(Engine):
        assert engine in row.lower()
