"""The tokenizer against the model and the data, with real tokenizers that have one fault each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fullshard.check import tokenizer as check
from fullshard.check.findings import Finding
from fullshard.families.language.encoders.chat import Chat
from fullshard.families.language.encoders.text import Text
from fullshard.hf.tokenizers.tokenizer import TokenizerTraining, load_tokenizer, train_tokenizer
from fullshard.text.chat import PLAIN

TEXTS = ["The cat sat on the mat.", "  def f(x):\n      return x\n", "Über Straßen\tund Plätze"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer") / "made"
    train_tokenizer(TEXTS, TokenizerTraining(vocab_size=300), folder=folder)
    return load_tokenizer(folder, trust_remote_code=False, where="model.tokenizer")


def words(*vocabulary: str, lower: bool = False, **special: str) -> Any:
    """A word tokenizer of the kind that has no byte to fall back on."""
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if lower:
        core.normalizer = normalizers.Lowercase()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **special)


def bad(findings: Any) -> list[Finding]:
    findings = list(findings)
    assert all(f.level == "ok" or f.remedy for f in findings)
    return [f for f in findings if f.level != "ok"]


def test_a_byte_level_tokenizer_has_ticks_only(trained: Any) -> None:
    config = {"bos_token_id": 0, "eos_token_id": [0, 1], "pad_token_id": None}
    findings = list(check.look(trained, rows=len(trained), texts=TEXTS, config=config))
    assert [(f.level, f.check) for f in findings] == [
        ("ok", "vocabulary"),
        ("ok", "special tokens"),
        ("ok", "round trip"),
    ]
    assert findings[2].text == "3 sample texts survive exactly, and so do other scripts"


def test_ids_beyond_the_embedding(trained: Any) -> None:
    (finding,) = bad(check.vocabulary(trained, rows=299))
    assert finding.level == "error"
    assert "ids up to 299, but the embedding has 299 rows" in finding.text


def test_unused_rows_and_a_new_size_are_noted(trained: Any) -> None:
    (note,) = check.vocabulary(trained, rows=2000)
    assert (note.level, note.text) == ("ok", "300 tokens, 2,000 embedding rows (1,700 rows unused)")
    (note,) = check.vocabulary(trained, rows=300, stored=256)
    assert (note.level, note.text) == ("ok", "300 tokens, 300 embedding rows, resized from 256")


def test_special_tokens() -> None:
    known = ("<unk>", "</s>", "a")
    (none,) = bad(check.special_tokens(words(*known), rows=3, config={}))
    assert (none.level, "no end token" in none.text) == ("warning", True)
    (beyond,) = bad(check.special_tokens(words(*known, eos_token="<end>"), rows=3, config={}))
    assert (beyond.level, "eos_token_id = 3 is outside the embedding of 3 rows" in beyond.text) == ("error", True)
    good = words(*known, eos_token="</s>")
    config = {"eos_token_id": [1, 151_645]}
    (strange,) = bad(check.special_tokens(good, rows=3, config=config))
    assert (strange.level, "config.json: eos_token_id = 151,645 is outside" in strange.text) == ("warning", True)
    (fine,) = check.special_tokens(good, rows=3, config={})
    assert (fine.level, fine.text) == ("ok", "ends with </s> (1); no padding token, which is fine")
    (same,) = check.special_tokens(words(*known, eos_token="</s>", pad_token="</s>"), rows=3, config={})
    assert "padding is masked by position, so the end is still learned" in same.text


def test_a_lossy_tokenizer_is_reported_with_an_example() -> None:
    lossy = words("<unk>", "the", "cat", lower=True)
    (finding,) = bad(check.round_trip(lossy, ["the cat", "The cat"]))
    assert finding.level == "warning"
    assert "changes 1 of 2 sample texts: 'The cat' comes back as 'the cat'" in finding.text


def test_scripts_that_the_data_does_not_have_are_a_note() -> None:
    (note,) = check.round_trip(words("<unk>", "the", "cat"), ["the cat"])
    assert note.level == "ok"
    assert "1 sample texts survive exactly; other scripts do not" in note.text


def test_unknown_tokens_above_one_per_cent() -> None:
    poor = words("<unk>", "the", "cat")
    assert not bad(check.unknown_tokens(poor, ["the cat " * 100, "dog"]))
    (finding,) = bad(check.unknown_tokens(poor, ["the cat " * 40, "dog"]))
    assert finding.level == "warning"
    assert "no token for 1.2% of the sample texts (such as 'dog'), allowed 1%" in finding.text


def test_the_chat_template_is_reported(trained: Any) -> None:
    assert list(check.chat_template(Text().open(trained, length=64))) == []
    (plain,) = check.chat_template(Chat().open(trained, length=64))
    assert plain.text == "plain (User: ... / Assistant: ...)"
    own = words("<unk>", eos_token="</s>")
    own.chat_template = "{{ messages }}"
    assert [f.text for f in check.chat_template(Chat().open(own, length=64))] == ["the tokenizer's own"]
    own.chat_template = PLAIN
    assert [f.text for f in check.chat_template(Chat().open(own, length=64))] == ["plain (User: ... / Assistant: ...)"]


def test_tokens_made_elsewhere(tmp_path: Path) -> None:
    import numpy as np

    samples: Any = [{"input_ids": np.array([1, 2, 3])}, {"input_ids": np.array([96])}, {"input_ids": np.array([])}]
    assert not bad(check.token_ids(samples, rows=97))
    (finding,) = bad(check.token_ids(samples, rows=96))
    assert finding.level == "error"
    assert "contains the token 96, but the embedding has 96 rows, for 0 to 95" in finding.text
    assert list(check.token_ids([{"labels": np.array([1])}], rows=5)) == []  # type: ignore[arg-type]
