"""Tokenizers: loaded from a folder or the hub, or trained on the run's own texts and cached by content.

Must not know models, data sources or ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from fullshard.config.part import Section
from fullshard.errors import DataError, RecipeError, SetupError, first_line

END, PAD = "<|endoftext|>", "<|pad|>"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
"""A folder without any of these has no tokenizer; Transformers would invent an empty one."""


class TokenizerTraining(Section):
    """A byte-level BPE trained on the training texts; it can encode any text."""

    vocab_size: int = Field(8192, ge=300)
    """The number of tokens, including special ones."""
    max_characters: int = Field(50_000_000, ge=1)
    """How much text it is trained on, from the beginning of the data."""

    @classmethod
    def from_short(cls, value: Any) -> Any:
        if isinstance(value, bool):
            return {}
        return {"vocab_size": value} if isinstance(value, int) else value

    def folder(self, cache: Path, fingerprint: str) -> Path:
        """The cache folder of the tokenizer for these settings and this data."""
        key = f"{self.vocab_size}:{self.max_characters}:{fingerprint}"
        return cache / "tokenizers" / hashlib.sha256(key.encode()).hexdigest()[:16]


class Tokenizer(Section):
    """A tokenizer other than the one stored with the model."""

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("path", "train"),)

    path: str | None = None
    """A folder or hub name."""
    train: TokenizerTraining | None = None
    """Train a byte-level BPE on the training texts; it is saved with the model."""

    @classmethod
    def from_short(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_of(self) -> Tokenizer:
        if (self.path is None) == (self.train is None):
            raise ValueError("give exactly one of tokenizer.path and tokenizer.train")
        return self


def fingerprint_of(texts: Iterable[str]) -> str:
    """A digest of the texts themselves, for callers without a fingerprint of their source."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def train_tokenizer(texts: Iterable[str], settings: TokenizerTraining, *, folder: Path) -> None:
    """Trains once; a second run with the same data loads the result."""
    from filelock import FileLock
    from transformers import PreTrainedTokenizerFast

    if folder.is_dir():
        return
    with contextlib.ExitStack() as held:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(f"{folder}.lock"))
        except OSError as error:
            raise SetupError(
                f"{folder.parent}: the trained tokenizer cannot be kept here: {error.strerror or error}. Set "
                "data.cache or the variable FULLSHARD_CACHE to a folder that you may write to."
            ) from error
        if folder.is_dir():
            return
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=_train(texts, settings), eos_token=END, bos_token=END, pad_token=PAD
        )
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            tokenizer.save_pretrained(made)
            os.replace(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _train(texts: Iterable[str], settings: TokenizerTraining) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    some = iter(texts)
    first = next(some, None)
    if first is None:
        raise DataError("model.tokenizer.train: there is no text to train on. Check data.train.")
    tokenizer.train_from_iterator(at_most(itertools.chain([first], some), settings.max_characters), trainer)
    return tokenizer


def at_most(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The texts, up to a total number of characters."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer file. Without one, Transformers would invent an empty tokenizer."""
    names = ("tokenizer*", "vocab*", "*.tiktoken", "spiece.model", "sentencepiece*", "merges.txt")
    return any(True for name in names for _ in folder.glob(name))


def load_tokenizer(folder: Path, *, trust_remote_code: bool, where: str) -> Any:
    """The tokenizer of a folder; raises RecipeError."""
    from transformers import AutoTokenizer

    try:
        if not has_tokenizer(folder):
            raise FileNotFoundError("no tokenizer.json, tokenizer.model or vocab file")
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise RecipeError(
                f"{where}: the tokenizer in {folder} needs its own Python code. Read that code, then set "
                "model.trust_remote_code: true."
            ) from error
        reason = first_line(error)
        raise RecipeError(
            f"{where}: {folder} holds no tokenizer that Transformers can load ({reason}). "
            "Name one in model.tokenizer (a folder or hub name), or train one: tokenizer: {train: {vocab_size: 8192}}."
        ) from error
