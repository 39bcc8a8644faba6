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
"""Who must find it: `check --quick`, `train` on one rank, ranks of the pool, or ranks that `check` has started."""


@dataclass
class Seed:
    """A case in the making: its own copy of a healthy place, and a recipe over it."""

    folder: Path
    patch: pytest.MonkeyPatch
    recipe: dict[str, Any]
    words: list[str] = field(default_factory=list)
    """What follows the recipe on the command line."""
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """What is taken for the time of the case, and given back after it."""

    def set(self, section: str, **values: Any) -> None:
        self.recipe[section] = {**self.recipe.get(section, {}), **values}

    def speak(self) -> None:
        """From token files to question-answer pairs, for a model that has a tokenizer."""
        self.set("model", path=str(self.folder / "spoken"))
        self.set("data", train=str(self.folder / "pairs.jsonl"), sequence_length=128)

    def lines(self, *records: Any, name: str = "train.jsonl") -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    def module(self, name: str, text: str) -> None:
        """Code of the user's own; the name must be new in this process."""
        (self.folder / f"{name}.py").write_text(text)
        self.patch.syspath_prepend(str(self.folder))

    def write(self) -> Path:
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(self.recipe, sort_keys=False))
        return path

    def ask(self, command: str, *options: str) -> Result:
        """The command in this process, from inside the folder."""
        return self.ask_for(str(self.write()), command, *options, *self.words)

    def ask_for(self, recipe: str, command: str, *options: str) -> Result:
        """The same for any recipe."""
        self.patch.chdir(self.folder)
        words = [command, recipe, *options]
        self.patch.setattr(sys, "argv", ["fullshard", *words])
        return CliRunner().invoke(app, words, catch_exceptions=False)


@dataclass(frozen=True)
class Mistake:
    """What one mistake is, and what must be said about it."""

    area: str
    make: Callable[[Seed], None]
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


def healthy_place(folder: Path) -> Path:
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


def seed_in(folder: Path, healthy: Path, patch: pytest.MonkeyPatch) -> Seed:
    """A copy of the healthy place to do harm in."""
    shutil.copytree(healthy, folder, dirs_exist_ok=True)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CXX"):
        patch.delenv(name, raising=False)
    patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # several nodes set it
    return Seed(folder, patch, small.recipe(folder))


def everything(folder: Path) -> dict[str, int | None]:
    """What lies in a folder, but for the data cache and compiled Python, which are meant to stay."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name.split(os.sep)[0] not in ("cache", "__pycache__", "recipe.yaml"):
            found[name] = path.stat().st_size if path.is_file() else None
    return found
