"""A tokenizer that is not the one of the stored weights is refused, and every resize of an embedding is printed."""

from __future__ import annotations

import logging
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from fullshard.config.part import decode
from fullshard.contracts.model import Family
from fullshard.errors import RecipeError
from fullshard.hf.tokenizers.same_vocabulary import difference
from fullshard.hf.tokenizers.tokenizer import TokenizerTraining, load_tokenizer, train_tokenizer
from tests.small import model_folder

ROWS = 600
TEXTS = [str(text) for text in topics.values()][:40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 600 rows with a tokenizer of 590 tokens, the same model without one, and other tokenizers."""
    path = tmp_path_factory.mktemp("tokenizers")
    for size in (400, 590, 900):
        texts = TEXTS if size == 590 else [text.upper() for text in TEXTS]
        train_tokenizer(texts, TokenizerTraining(vocab_size=size), folder=path / str(size))
        assert len(loaded(path / str(size))) == size
    for name in ("model", "bare"):
        model_folder(path / name, vocab_size=ROWS)
    loaded(path / "590").save_pretrained(path / "model")
    more = loaded(path / "590")
    more.add_tokens([f"<extra {number}>" for number in range(30)])
    more.save_pretrained(path / "more")
    # The same number of tokens in another order: every id is there, and means another word.
    train_tokenizer([text[::-1] for text in TEXTS], TokenizerTraining(vocab_size=590), folder=path / "other")
    return path


def loaded(folder: Path) -> Any:
    return load_tokenizer(folder, trust_remote_code=False, where="model.tokenizer")


def rows_of(folder: Path, model: str, tokenizer: str | None, **settings: Any) -> int:
    section = {"path": str(folder / model), **({"tokenizer": str(folder / tokenizer)} if tokenizer else {}), **settings}
    family = decode(Family, section, where="model")
    module: Any = family.build(processor=family.processor(cache=folder))
    return int(module.get_input_embeddings().num_embeddings)


@pytest.mark.parametrize("name", ["400", "900", "other"])
@pytest.mark.parametrize("kind", ["hf", "sentence_transformer"])
def test_another_tokenizer_is_refused_unless_the_recipe_agrees(
    folder: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    words = (
        rf"model\.tokenizer is not the tokenizer of these weights: it has {len(loaded(folder / name))} tokens and the"
    )
    for settings in ({}, {"resize_embedding": False}):
        with pytest.raises(RecipeError, match=rf"{words} model's own 590.*set model\.resize_embedding: true"):
            rows_of(folder, "model", name, kind=kind, **settings)
    caplog.clear()
    tokens = len(loaded(folder / name))
    assert rows_of(folder, "model", name, kind=kind, resize_embedding=True) == tokens
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any(line.startswith("model.tokenizer is not the tokenizer of these weights (it has") for line in said)
    assert f"the embedding is resized from 600 to {tokens} rows, one for each token" in said


def test_the_models_own_tokenizer_is_not_remarked_on(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in (None, "590", "model"):
        assert rows_of(folder, "model", name) == ROWS
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_tokens_added_to_the_models_own_tokenizer_grow_the_embedding(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert difference(loaded(folder / "more"), loaded(folder / "model")) is None
    assert difference(loaded(folder / "model"), loaded(folder / "more")) is not None
    assert rows_of(folder, "model", "more") == 620
    assert "the embedding is resized from 600 to 620 rows, one for each token" in caplog.messages


def test_the_same_words_cut_in_another_way_are_another_tokenizer(folder: Path, tmp_path: Path) -> None:
    from tokenizers.normalizers import Lowercase

    other = loaded(folder / "590")
    other.backend_tokenizer.normalizer = Lowercase()
    assert "it encodes 'The quick brown fox jump' ... as" in str(difference(other, loaded(folder / "590")))


def test_without_a_stored_tokenizer_the_size_is_compared(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("400", "900"):
        with pytest.raises(RecipeError, match=rf"it has {name} tokens and the embedding 600 rows \(no tokenizer"):
            rows_of(folder, "bare", name)
        assert rows_of(folder, "bare", name, resize_embedding=True) == int(name)
    caplog.clear()
    assert rows_of(folder, "bare", "590") == ROWS
    (said,) = caplog.messages[-1:]
    assert said.startswith(
        "model.tokenizer cannot be compared: no tokenizer is stored with the weights; it has 590 tok"
    )


def test_another_end_of_text_is_reported(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = loaded(folder / "590")
    other.eos_token = "<|pad|>"
    other.save_pretrained(tmp_path)
    rows_of(folder, "model", str(tmp_path))
    assert (
        "model.tokenizer ends a text with <|pad|>, and the model's own tokenizer with <|endoftext|>" in caplog.messages
    )
