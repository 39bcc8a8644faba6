"""The README's commands and snippets, run as they stand, in a folder with a small model and small data."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    lines = "\n".join(blocks("bash")).splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.startswith("fullshard")]


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
    return path


def _tokenizer(folder: Path) -> None:
    from pydoc_data.topics import topics

    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(topics.values(), vocab_size=1000, special_tokens=["<|end|>"], show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|end|>").save_pretrained(folder)


def run(arguments: list[str], folder: Path) -> str:
    command = [sys.executable, "-m", "fullshard", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("command", commands())
def test_commands_run_as_written(command: str, folder: Path) -> None:
    output = run(shlex.split(command)[1:], folder)
    if command == "fullshard train recipe.yaml":
        assert "Training complete!" in output
        assert (folder / "runs" / "my-model" / "model" / "adapter_model.safetensors").exists()


def test_the_recipe_is_at_most_ten_keys() -> None:
    recipe = yaml.safe_load(blocks("yaml")[0])
    assert sum(len(value) if isinstance(value, dict) else 1 for value in recipe.values()) <= 10


def test_python_from_the_readme(folder: Path) -> None:
    snippet = next(block for block in blocks("python") if "fullshard.train" in block)
    done = subprocess.run([sys.executable, "-c", snippet], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("runs/my-model")


def test_make_targets_are_the_two_commands() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "fullshard train quickstart" in makefile
    assert re.findall(r"make (\w+)", blocks("bash")[0]) == ["quickstart", "test"]
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_quickstart_does_what_the_readme_says(tmp_path: Path) -> None:
    """The whole main job, on 2 real ranks; then the model snippet; then the same command again."""
    output = run(["train", "quickstart"], tmp_path)
    for promised in (
        "fullshard: quickstart",
        "proven",
        "New Best Val Loss",
        "Sample continuation",
        "Training complete!",
    ):
        assert promised in output
    assert re.search(r"Next:\n  1\. .*\n  2\. .*\n  3\. ", output)
    records = [json.loads(line) for line in (tmp_path / "runs/quickstart/metrics.jsonl").read_text().splitlines()]
    train = [record["loss"] for record in records if record["kind"] == "train"]
    validation = [record["loss"] for record in records if record["kind"] == "validation"]
    assert train[-1] < 0.75 * train[0]
    assert validation == sorted(validation, reverse=True)
    snippet = next(block for block in blocks("python") if "AutoTokenizer" in block)
    subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, check=True, capture_output=True)
    again = run(["train", "quickstart"], tmp_path)
    assert "is finished" in again
    assert "--resume never" in again
    assert "duration.epochs=6" in again
