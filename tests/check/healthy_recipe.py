"""A healthy recipe over real files. A test makes one mistake in it; the command must find it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from typer.testing import CliRunner, Result

from fullshard.cli import app
from tests import small

By = Literal["check", "train", "trial", "launch"]
"""Who must find it: `check --quick`, `train` on one rank, ranks of the pool, or ranks that `check` starts."""


@dataclass
class Workspace:
    """A copy of the healthy folder with a recipe over it, for a test to break."""

    folder: Path
    patch: pytest.MonkeyPatch
    recipe: dict[str, Any]
    words: list[str] = field(default_factory=list)
    """Further words of the command line, after the recipe."""
    cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Closed after the test: ports, files and limits that it holds."""

    def set(self, section: str, **values: Any) -> None:
        self.recipe[section] = {**self.recipe.get(section, {}), **values}

    def use_texts(self) -> None:
        """Switches from token files to question-answer pairs, for a model that has a tokenizer."""
        self.set("model", path=str(self.folder / "spoken"))
        self.set("data", train=str(self.folder / "pairs.jsonl"), sequence_length=128)

    def write_records(self, *records: Any, name: str = "train.jsonl") -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    def write_module(self, name: str, text: str) -> None:
        """Writes a module of the user; its name must be new in this process."""
        (self.folder / f"{name}.py").write_text(text)
        self.patch.syspath_prepend(str(self.folder))

    def write(self) -> Path:
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(self.recipe, sort_keys=False))
        return path

    def run(self, command: str, *options: str) -> Result:
        """Runs the command in this process, from inside the folder."""
        return self.run_on(str(self.write()), command, *options, *self.words)

    def run_on(self, recipe: str, command: str, *options: str) -> Result:
        """The same for any recipe."""
        self.patch.chdir(self.folder)
        words = [command, recipe, *options]
        self.patch.setattr(sys, "argv", ["fullshard", *words])
        return CliRunner().invoke(app, words, catch_exceptions=False)


@dataclass(frozen=True)
class Mistake:
    """A mistake, and what the command must say about it."""

    area: str
    make: Callable[[Workspace], None]
    section: str
    check: str
    says: tuple[str, ...]
    remedy: str
    level: str
    by: By
    code: int

    @property
    def name(self) -> str:
        return f"{self.area}-{self.make.__name__}"


def healthy_folder(folder: Path) -> Path:
    """A model of tokens with token files, and a model with a tokenizer with texts and question-answer pairs."""
    from pydoc_data.topics import topics

    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    small.model_folder(folder / "model")
    small.token_file(folder / "train.jsonl", records=64)
    some = sorted(topics)[:40]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        [topics[name] for name in some], vocab_size=400, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|end|>")
    small.model_folder(folder / "spoken", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder / "spoken")
    pairs = [{"question": f"What is {name}?", "answer": " ".join(topics[name].split()[:6])} for name in some]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    texts = [{"text": topics[name][:400]} for name in some]
    (folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    return folder


def workspace_in(folder: Path, healthy: Path, patch: pytest.MonkeyPatch) -> Workspace:
    """A copy of the healthy folder, for a test to break."""
    shutil.copytree(healthy, folder, dirs_exist_ok=True)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CXX"):
        patch.delenv(name, raising=False)
    patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # several nodes set it
    return Workspace(folder, patch, small.recipe(folder))


def files_in(folder: Path) -> dict[str, int | None]:
    """The files in a folder, without the data cache and compiled Python, which may stay."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name.split(os.sep)[0] not in ("cache", "__pycache__", "recipe.yaml"):
            found[name] = path.stat().st_size if path.is_file() else None
    return found
