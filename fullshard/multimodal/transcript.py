"""One sample of the training data for a person to read: token by token, with what is trained on.

`fullshard check RECIPE --sample N` prints it. Must not know any encoder: each says in words what the parts of its
samples mean.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np
from rich.text import Text

from fullshard.contracts.data import IGNORE, Features, OpenEncoder
from fullshard.data.prepare import Prepared
from fullshard.errors import EXIT_DONE, DataError
from fullshard.formatting.plural import counted
from fullshard.log.console import FILE_WIDTH, is_terminal, open_screen
from fullshard.text.tokens import inner_tokenizer

TRAINED = "T"
_INDENT = "    "
_FEWEST = 8
"""Equal tokens in a row, as of an image, are shown once with their number from this many on."""


@dataclass(frozen=True)
class Token:
    """A token of a sample."""

    id: int
    text: str
    target: str | None
    """What the model learns to predict here: the token itself, or another one that the labels name; None: nothing."""

    @property
    def mark(self) -> str:
        return "" if self.target is None else TRAINED if self.target == self.text else f"{TRAINED}={self.target}"


def show(data: Prepared, number: int, *, as_json: bool) -> int:
    """Prints sample `number`, counted from 0; returns the exit code."""
    stored, encoder = data.train_from, data.encoder
    if not 0 <= number < len(stored.chosen):
        raise DataError(
            f"--sample {number}: the training data has {counted(len(stored.chosen), 'sample')}, numbered from 0. Use "
            f"a number from 0 to {len(stored.chosen) - 1}."
        )
    index = int(stored.chosen[number])
    sample, where = stored.store[index], stored.records.where(int(stored.store.records[index]))
    tokens, passages = tokens_of(sample, encoder), encoder.passages(sample)
    if as_json:
        parts = [{"words": words, "tokens": size} for words, size in passages]
        found = {"sample": number, "of": len(stored.chosen), "from": where, "passages": parts}
        sys.stdout.write(json.dumps({**found, "tokens": [asdict(token) for token in tokens]}, indent=1) + "\n")
        return EXIT_DONE
    on_terminal = is_terminal(sys.stdout)
    screen, width = open_screen(None, on_terminal=on_terminal), FILE_WIDTH
    if on_terminal:
        width = max(50, min(shutil.get_terminal_size().columns, 120))
    title = f"Sample {number} of {len(stored.chosen):,}, from {where}"
    for line in [title, *transcript(tokens, passages, width=width)]:
        screen.print(Text(line), soft_wrap=True)
    return EXIT_DONE


def tokens_of(sample: Features, encoder: OpenEncoder) -> list[Token]:
    """The tokens of a sample, as the tokenizer writes each of them."""
    if not {"input_ids", "labels"} <= sample.keys():
        raise DataError(
            f"--sample shows tokens and what is trained on. Samples of data.encode.kind = {encoder.settings.kind()} "
            "have no labels for tokens. Leave --sample out."
        )
    ids = sample["input_ids"]
    targets = np.full(len(ids), IGNORE)
    # The label of a position is the token after it.
    targets[1:] = sample["labels"][:-1]
    tokenizer = inner_tokenizer(encoder.processor)
    every = {int(one): _text(int(one), tokenizer) for one in {*ids.tolist(), *targets.tolist()} - {IGNORE}}
    return [Token(int(one), every[int(one)], every.get(int(target))) for one, target in zip(ids, targets, strict=True)]


def _text(token: int, tokenizer: Any) -> str:
    """The text of one token in visible characters: a dot is a space."""
    if tokenizer is None:
        return str(token)
    piece, text = str(tokenizer.convert_ids_to_tokens(token)), tokenizer.decode([token], skip_special_tokens=False)
    if not text or "\ufffd" in text:
        text = piece  # a part of a character
    elif piece.startswith("▁") and not text.startswith(" "):
        text = f" {text}"
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text).replace(" ", "·")


def transcript(tokens: Sequence[Token], passages: Sequence[tuple[str, int]], *, width: int) -> Iterator[str]:
    """Lines: how much is trained on, then the words of each passage and its tokens, with a T under those trained on."""
    trained = sum(token.target is not None for token in tokens)
    other = f"; {TRAINED}=x: the label is x" if any(len(token.mark) > 1 for token in tokens) else ""
    yield f"{counted(len(tokens), 'token')}, {trained:,} trained on (marked {TRAINED}){other}; · is a space"
    at = 0
    for words, size in passages:
        yield ""
        if words:
            yield words
        yield from _table(tokens[at : at + size], width - len(_INDENT))
        at += size


def _table(tokens: Sequence[Token], width: int) -> Iterator[str]:
    """Lines of tokens, each with its marks below."""
    top = bottom = ""
    for text, mark in [*_cells(tokens), ("", "")]:
        size = max(len(text), len(mark)) + 1
        if top and (not text or len(top) + size > width):
            yield f"{_INDENT}{top}".rstrip()
            if bottom.strip():
                yield f"{_INDENT}{bottom}".rstrip()
            top = bottom = ""
        top, bottom = top + text.ljust(size), bottom + mark.ljust(size)


def _cells(tokens: Sequence[Token]) -> Iterator[tuple[str, str]]:
    for token, run in groupby(tokens):
        count = sum(1 for _ in run)
        if count >= _FEWEST and token.target is None:
            yield f"{token.text} x {count:,}", ""
        else:
            yield from [(token.text, token.mark)] * count
