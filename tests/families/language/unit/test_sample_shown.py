"""What `check --sample` prints of texts and conversations: token by token what is trained on."""

from __future__ import annotations

from typing import Any

import pytest

from fullshard.config.part import decode
from fullshard.contracts.data import Encoder
from fullshard.errors import DataError
from fullshard.multimodal.transcript import tokens_of, transcript
from tests.tiny_tokenizers import CHATML, make_tokenizer

TEXT = """\
5 tokens, 4 trained on (marked T); · is a space

    the ·lazy ·dog \\n <eos>
        T     T    T  T"""
IDS = """\
4 tokens, 2 trained on (marked T); T=x: the label is x; · is a space

    ( ) *   +
      T T=("""
CHAT = """\
41 tokens, 7 trained on (marked T); · is a space

    <|im_start|> u s er \\n he llo ·there <|im_end|> \\n <|im_start|> a s sis
    tant \\n f in e <|im_end|> \\n <|im_start|> u s er \\n who ·are ·you
            T T  T T
    <|im_end|> \\n <|im_start|> a s sis tant \\n the ·fox <|im_end|> \\n
                                               T   T    T"""
ALL = """\
21 tokens, 20 trained on (marked T); · is a space

    <|im_start|> u s er \\n who ·are ·you <|im_end|> \\n <|im_start|> a s sis
                 T T T  T  T   T    T    T          T  T            T T T
    tant \\n f in e <|im_end|> \\n
    T    T  T T  T T          T"""

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "text": ({"kind": "text"}, {"text": "the lazy dog\n"}, TEXT),
    "token ids with labels": (
        {"kind": "text"},
        {"input_ids": [10, 11, 12, 13], "labels": [-100, 11, 10, -100]},
        IDS,
    ),
    "chat": (
        {"kind": "chat"},
        {
            "messages": [
                {"role": "user", "content": "hello there"},
                {"role": "assistant", "content": "fine"},
                {"role": "user", "content": "who are you"},
                {"role": "assistant", "content": "the fox"},
            ]
        },
        CHAT,
    ),
    "everything of a chat": (
        {"kind": "chat", "train_on": "all"},
        {"question": "who are you", "answer": "fine"},
        ALL,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_trained_on(case: str) -> None:
    settings, record, expected = CASES[case]
    encoder = decode(Encoder, settings, where="data.encode").open(make_tokenizer(chat_template=CHATML), length=64)
    [sample] = encoder.encode(record).samples
    assert "\n".join(transcript(tokens_of(sample, encoder), encoder.passages(sample), width=80)) == expected


def test_data_of_token_ids_needs_no_tokenizer() -> None:
    encoder = decode(Encoder, {"kind": "text"}, where="data.encode").open(None, length=64)
    [sample] = encoder.encode({"input_ids": [10, *[11] * 12]}).samples
    [_, _, tokens, marks] = transcript(tokens_of(sample, encoder), encoder.passages(sample), width=80)
    assert tokens.split() == ["10", *["11"] * 12]
    assert marks.count("T") == 12


def test_samples_without_labels_are_not_shown() -> None:
    encoder = decode(Encoder, {"kind": "pairs"}, where="data.encode").open(make_tokenizer(), length=64)
    [sample] = encoder.encode({"query": "the fox", "positive": "the dog"}).samples
    with pytest.raises(DataError, match="Samples of data.encode.kind = pairs have no labels for tokens"):
        tokens_of(sample, encoder)
