"""Records of question, reasoning and answer become rows of three documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullshard.contracts.data import IGNORE
from fullshard.errors import DataError
from fullshard.families.reasoning.encoders.reasoning import COLUMNS, Reasoning

RECORD = {"question": "Is 7 odd?", "reasoning": "7 is not a multiple of 2.", "answer": "Yes, it is."}


def encoded(tokenizer: Any, record: dict[str, Any] = RECORD, *, length: int = 256, **settings: Any) -> Any:
    return Reasoning(**settings).open(tokenizer, length=length).encode(record)


def test_a_row_has_the_conversation_then_both_texts_alone(tokenizer: Any) -> None:
    [row] = encoded(tokenizer).samples
    begin, middle, _, end = row["spans"]
    conversation, reasoning, answer = (
        tokenizer.decode(row["input_ids"][a:b]) for a, b in ((0, begin), (begin, middle), (middle, end))
    )
    assert conversation.startswith("User: Is 7 odd?")
    assert "7 is not a multiple of 2.\n\nYes, it is." in conversation
    assert (reasoning, answer) == (RECORD["reasoning"], RECORD["answer"])
    batch = Reasoning().collate([row], length=None)
    assert batch["position_ids"].tolist() == [[*range(begin), *range(middle - begin), *range(end - middle)]]
    assert (row["labels"][begin:] == IGNORE).all()
    learned = row["labels"][row["labels"] != IGNORE]
    assert tokenizer.decode(learned[:-1]).strip() == "7 is not a multiple of 2.\n\nYes, it is."


@pytest.mark.parametrize("question", COLUMNS["question"])
@pytest.mark.parametrize("reasoning", COLUMNS["reasoning"])
@pytest.mark.parametrize("answer", COLUMNS["answer"])
def test_columns_have_the_usual_names(tokenizer: Any, question: str, reasoning: str, answer: str) -> None:
    record = {question: RECORD["question"], reasoning: RECORD["reasoning"], answer: RECORD["answer"]}
    assert Reasoning().parts(record) == list(RECORD.values())


def test_other_columns_can_be_named_and_a_choice_is_asked_for(tokenizer: Any) -> None:
    record = {**RECORD, "analysis": "Another one."}
    with pytest.raises(DataError, match="both 'reasoning' and 'analysis' may be the reasoning"):
        encoded(tokenizer, record)
    assert Reasoning(reasoning="analysis").parts(record)[1] == "Another one."
    with pytest.raises(DataError, match="no column is the answer of the record"):
        encoded(tokenizer, {key: value for key, value in RECORD.items() if key != "answer"})
    with pytest.raises(DataError, match="'answer', the answer, must be a text that is not blank"):
        encoded(tokenizer, {**RECORD, "answer": " "})


def test_a_long_conversation_leaves_room_for_the_texts_that_are_compared(tokenizer: Any) -> None:
    found = encoded(tokenizer, {**RECORD, "reasoning": "7 is odd. " * 100}, length=64)
    [row] = found.samples
    assert (len(row["input_ids"]), found.truncated) == (32 + 16 + row["spans"][3] - row["spans"][2], 1)
    late = encoded(tokenizer, {**RECORD, "question": "Is 7 odd? " * 100}, length=64)
    assert (list(late.samples), len(late.dropped)) == ([], 1)


def test_equal_texts_have_equal_keys(tokenizer: Any) -> None:
    one, other = (encoded(tokenizer, {**RECORD, "reasoning": text}).samples[0] for text in ("Because.", "So."))
    assert one["keys"][0] != other["keys"][0]
    assert one["keys"][1] == other["keys"][1]
    batch = Reasoning().collate([one, other], length=None)
    assert batch["keys"].dtype == batch["spans"].dtype == torch.int64
    assert batch["spans"].shape == (2, 4)
