"""Small real things for whole embedding runs: models with a tokenizer of forty words, pairs with uneven negatives."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import small

WORDS = [
    f"{first}{second}"
    for first in ("ba", "do", "ki", "lu", "me")
    for second in ("n", "r", "s", "t", "k", "p", "x", "m")
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", "doc", ":"]
RECORDS = 42  # with 8 samples a step, the sixth step of an epoch holds 2


def tokenizer(*, ends: bool = True, padding_side: str = "right") -> Any:
    """Words to tokens, with the special tokens of BERT around them if it has `ends`, else with one after them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", words["[CLS]"]), ("[SEP]", words["[SEP]"])]
    around = "[CLS] $A [SEP]" if ends else "$A [SEP]"
    made.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side=padding_side, **names)


def encoder(folder: Path, kind: str = "BertModel", **changes: Any) -> Path:
    """A tiny encoder of the BERT family, by its class in Transformers, with fixed random weights and its tokenizer."""
    import torch
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": len(SPECIAL) + len(WORDS),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 34,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.3,
        "pad_token_id": 0,
    }
    model = getattr(transformers, kind)
    torch.manual_seed(3)
    model(model.config_class(**settings | changes)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def decoder(folder: Path, *, padding_side: str = "right", **changes: Any) -> Path:
    """A tiny Qwen3 with its head and a tokenizer."""
    settings = {"vocab_size": len(SPECIAL) + len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0}
    small.model_folder(folder, **settings | changes)
    tokenizer(ends=False, padding_side=padding_side).save_pretrained(folder)
    return folder


def text(draw: random.Random, about: int) -> str:
    """One to ten words, most of them of one topic."""
    topic = WORDS[about % 10 * 4 : about % 10 * 4 + 4]
    return " ".join(draw.choice(topic if draw.random() < 0.7 else WORDS) for _ in range(draw.choice([1, 2, 3, 5, 10])))


def pairs(path: Path, *, records: int = RECORDS, seed: int = 0, negatives: Sequence[int] = (0, 2, 1, 3)) -> list[Any]:
    """Records whose query and positive share a topic; the number of negatives goes round, a few positives are equal."""
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for index in range(records):
        row: dict[str, Any] = {"query": text(draw, index), "positive": text(draw, index)}
        if index % 9 == 8:
            row["positive"] = rows[index - 3]["positive"]
        if number := negatives[index % len(negatives)]:
            row["negatives"] = [text(draw, index + other + 1) for other in range(number)]
        rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def recipe(folder: Path, **sections: Any) -> dict[str, Any]:
    """Six steps of contrastive training of `folder/model` on `folder/train.jsonl`."""
    own: dict[str, Any] = {
        "model": {"kind": "sentence_transformer", "path": str(folder / "model")},
        "objective": {"kind": "contrastive"},
        "data": {"sequence_length": 24, "pack": True},
        "batch": {"per_device": 2, "global": 8},
        "optimizer": {"lr": 5e-3},
    }
    merged = {
        name: {**own.get(name, {}), **given} if isinstance(given := sections.get(name, {}), dict) else given
        for name in {*own, *sections}
    }
    return small.recipe(folder, **merged)
