"""Tokens and labels of text and chat records, against references written out here and Transformers' own masks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fullshard.config.part import decode, kinds
from fullshard.contracts.data import IGNORE, NOTHING_LEARNED, Encoder, Features
from fullshard.data.prepare import choose_encoder
from fullshard.errors import DataError, RecipeError
from fullshard.families.language.encoders.chat import Chat
from fullshard.families.language.encoders.text import Text
from fullshard.text.chat import PAIRS, PLAIN

LONG = 10_000
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "who are you"},
    {"role": "assistant", "content": "the lazy dog"},
    {"role": "user", "content": "and the fox?"},
    {"role": "assistant", "content": " jumps\n\nover "},
]


def one(samples: Any) -> Features:
    assert len(samples) == 1
    features: Features = samples[0]
    assert features["input_ids"].dtype == features["labels"].dtype == np.int32
    return features


def learned(features: Features) -> list[int]:
    """The tokens that are targets, after a check that each is the token that follows."""
    ids, labels = features["input_ids"], features["labels"]
    assert labels[-1] == IGNORE
    targets = np.flatnonzero(labels != IGNORE)
    assert (labels[targets] == ids[targets + 1]).all()
    return [int(t) for t in labels[targets]]


def fault(call: Callable[[], Any]) -> str:
    with pytest.raises(DataError) as caught:
        call()
    return str(caught.value)


# --- text


def test_text_ends_with_eos_and_learns_every_next_token(tokenizer: Any) -> None:
    features = one(Text().open(tokenizer, length=LONG).encode({"text": "the quick fox"}).samples)
    expected = [*tokenizer("the quick fox")["input_ids"], tokenizer.eos_token_id]
    assert features["input_ids"].tolist() == expected
    assert features["labels"].tolist() == [*expected[1:], IGNORE]


def test_text_without_eos_and_with_eos_already_there(tokenizer_with: Callable[..., Any]) -> None:
    bare = tokenizer_with(eos=None)
    found = one(Text().open(bare, length=LONG).encode({"text": "the fox"}).samples)
    assert found["input_ids"].tolist() == bare("the fox")["input_ids"]
    ended = tokenizer_with()
    ids = one(Text().open(ended, length=LONG).encode({"text": "the<eos>"}).samples)["input_ids"].tolist()
    assert ids.count(ended.eos_token_id) == 1


@pytest.mark.parametrize("length", [2, 3, 4, 5, 7, 100])
def test_a_long_text_gives_pieces_that_predict_every_token_once(tokenizer: Any, length: int) -> None:
    whole = one(Text().open(tokenizer, length=LONG).encode({"text": "the quick brown fox jumps"}).samples)
    pieces = Text().open(tokenizer, length=length).encode({"text": "the quick brown fox jumps"}).samples
    assert all(len(piece["input_ids"]) <= length for piece in pieces)
    targets = np.concatenate([piece["labels"] for piece in pieces])
    assert targets[targets != IGNORE].tolist() == whole["input_ids"][1:].tolist()


def test_text_in_a_batch_equals_one_by_one(tokenizer: Any) -> None:
    records = [{"text": "the fox"}, {"input_ids": [5, 6, 7]}, {"text": ""}, {"text": "dog and dog"}]
    many = Text().open(tokenizer, length=3).encode_many(records)
    for record, samples in zip(records, many, strict=True):
        single = Text().open(tokenizer, length=3).encode(record).samples
        assert [s["input_ids"].tolist() for s in samples.samples] == [s["input_ids"].tolist() for s in single]


def test_token_ids_are_used_unchanged(tokenizer: Any) -> None:
    plain = one(Text().open(tokenizer, length=LONG).encode({"input_ids": [5, 6, 7]}).samples)
    assert (plain["input_ids"].tolist(), plain["labels"].tolist()) == ([5, 6, 7], [6, 7, IGNORE])
    same = {"input_ids": [5, 6, 7], "labels": [IGNORE, 6, 7]}
    assert one(Text().open(tokenizer, length=LONG).encode(same).samples)["labels"].tolist() == [6, 7, IGNORE]
    moved = {"input_ids": [5, 6, 7], "labels": [IGNORE, 7, 8], "labels_shifted": True}
    assert one(Text().open(tokenizer, length=LONG).encode(moved).samples)["labels"].tolist() == [IGNORE, 7, 8]
    padded = {"input_ids": [0, 0, 5, 6, 7, 0], "attention_mask": [0, 0, 1, 1, 1, 0]}
    cut = one(Text().open(tokenizer, length=LONG).encode(padded).samples)
    assert (cut["input_ids"].tolist(), cut["labels"].tolist()) == ([5, 6, 7], [6, 7, IGNORE])


def test_text_faults(tokenizer: Any) -> None:
    def message(record: dict[str, Any], **settings: Any) -> str:
        return fault(lambda: Text(**settings).open(tokenizer, length=LONG).encode(record).samples)

    assert "no 'text' or 'input_ids' in the record. Keys found: 'body', 'id'. Accepted: text:" in message(
        {"body": "x", "id": 1}
    )
    assert "no 'body' in the record" in message({"text": "x"}, column="body")
    assert "'text' must be a string, found 3" in message({"text": 3})
    assert message({"text": None}).startswith("'text' is null in the record")
    assert "no 'body' in the record. Keys found: 'text' (null)." in message({"text": None}, column="body")
    assert "both 'text' and 'input_ids'" in message({"text": "x", "input_ids": [1]})
    assert f"goes from 1 to 9999, but the tokenizer has the ids 0 to {len(tokenizer) - 1}" in message(
        {"input_ids": [1, 9999]}
    )
    assert "goes from -1 to 2" in message({"input_ids": [-1, 2]})
    assert "'input_ids' must be a list of whole numbers" in message({"input_ids": ["a"]})
    assert "'labels' has 1 entry, but 'input_ids' has 2" in message({"input_ids": [1, 2], "labels": [1]})
    assert "'labels' holds -1; allowed are -100 and" in message({"input_ids": [1, 2], "labels": [1, -1]})
    for encoder, record in ((Text(), {"text": "x"}), (Chat(), {"question": "x", "answer": "y"})):
        with pytest.raises(RecipeError, match=r"^model\.tokenizer: .*model\.tokenizer=\{train: \{vocab_size: 8192\}\}"):
            encoder.open(None, length=9).encode(record)
    chosen = one(Text(column="body").open(tokenizer, length=LONG).encode({"text": "no", "body": "the"}).samples)
    assert tokenizer.decode(chosen["input_ids"]) == "the<eos>"


# --- chat


def chatml_reference(messages: list[dict[str, str]], tokenizer: Any) -> tuple[list[int], list[int]]:
    """ChatML written out: every part tokenised by itself, an answer is its text and the end-of-turn token."""
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    newline = tokenizer("\n")["input_ids"]
    ids: list[int] = []
    labels: list[int] = []
    for message in messages:
        head = [start, *tokenizer(message["role"] + "\n")["input_ids"]]
        body = [*tokenizer(message["content"])["input_ids"], end]
        ids += head + body + newline
        said = body if message["role"] == "assistant" else [IGNORE] * len(body)
        labels += [IGNORE] * len(head) + said + [IGNORE] * len(newline)
    return ids, [*labels[1:], IGNORE]


def test_chat_masks_equal_a_reference_written_out(chatml: Any) -> None:
    features = one(Chat().open(chatml, length=LONG).encode({"messages": CHAT}).samples)
    ids, labels = chatml_reference(CHAT, chatml)
    assert features["input_ids"].tolist() == ids == chatml.apply_chat_template(CHAT)["input_ids"]
    assert features["labels"].tolist() == labels
    assert chatml.decode(learned(features)) == "the lazy dog<|im_end|> jumps\n\nover <|im_end|>"


def test_chat_masks_equal_transformers_where_the_template_marks_them(tokenizer_with: Callable[..., Any]) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
        "{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    )
    tokenizer = tokenizer_with(chat_template=template)
    for messages in (CHAT, CHAT[:3], CHAT[1:3]):
        truth = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        features = one(Chat().open(tokenizer, length=LONG).encode({"messages": messages}).samples)
        assert features["input_ids"].tolist() == truth["input_ids"]
        mask = np.array(truth["assistant_masks"][1:] + [0], dtype=bool)
        assert (features["labels"] != IGNORE).tolist() == mask.tolist()
        learned(features)


def test_chat_masks_agree_between_marked_and_unmarked_templates(
    tokenizer_with: Callable[..., Any], chatml: Any
) -> None:
    marked = tokenizer_with(
        chat_template=chatml.chat_template.replace(
            "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}",
            "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
            "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
            "{{ '\n' }}",
        )
    )
    a = one(Chat().open(chatml, length=LONG).encode({"messages": CHAT}).samples)
    b = one(Chat().open(marked, length=LONG).encode({"messages": CHAT}).samples)
    assert a["labels"].tolist() == b["labels"].tolist()


def test_a_template_that_drops_earlier_thinking_gives_a_sample_for_each_answer(
    tokenizer_with: Callable[..., Any],
) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
        "{{ m['content'] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = tokenizer_with(chat_template=template)
    samples = Chat().open(tokenizer, length=LONG).encode({"messages": CHAT}).samples
    assert [tokenizer.decode(s["input_ids"]) for s in samples] == [
        tokenizer.apply_chat_template(CHAT[:3], tokenize=False),
        tokenizer.apply_chat_template(CHAT, tokenize=False),
    ]
    assert [tokenizer.decode(learned(s)) for s in samples] == [
        "<think></think>the lazy dog<|im_end|>",
        "<think></think> jumps\n\nover <|im_end|>",
    ]


def test_a_prompt_that_opens_more_than_the_answer_keeps(tokenizer_with: Callable[..., Any], chatml: Any) -> None:
    template = chatml.chat_template.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'")
    tokenizer = tokenizer_with(chat_template=template)
    features = one(Chat().open(tokenizer, length=LONG).encode({"messages": CHAT[1:3]}).samples)
    assert tokenizer.decode(learned(features)) == "the lazy dog<|im_end|>"


def test_a_template_without_an_end_of_turn_token_gets_eos(tokenizer_with: Callable[..., Any]) -> None:
    template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer = tokenizer_with(chat_template=template)
    features = one(Chat().open(tokenizer, length=LONG).encode({"messages": CHAT[1:3]}).samples)
    assert tokenizer.decode(learned(features)).strip() == "the lazy dog\n<eos>"


def test_plain_template(tokenizer: Any, tokenizer_with: Callable[..., Any]) -> None:
    features = one(Chat().open(tokenizer, length=LONG).encode({"messages": CHAT}).samples)
    assert tokenizer.decode(features["input_ids"]) == (
        "be brief\n\nUser: who are you\nAssistant: the lazy dog<eos>\nUser: and the fox?\n"
        "Assistant:  jumps\n\nover <eos>\n"
    )
    assert tokenizer.decode(learned(features)) == " the lazy dog<eos>  jumps\n\nover <eos>"
    # It is an ordinary chat template, so that an exported tokenizer can carry it.
    carrier = tokenizer_with(chat_template=PLAIN)
    assert carrier.apply_chat_template(CHAT)["input_ids"] == features["input_ids"].tolist()
    prompt = carrier.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(features["input_ids"]).startswith(prompt)
    begun = tokenizer_with(bos="<bos>")
    assert begun.decode(
        one(Chat().open(begun, length=LONG).encode({"messages": CHAT}).samples)["input_ids"]
    ).startswith("<bos>be")


def test_plain_can_be_asked_for(chatml: Any, tokenizer: Any) -> None:
    asked = one(Chat(template="plain").open(chatml, length=LONG).encode({"messages": CHAT}).samples)
    assert chatml.decode(asked["input_ids"]).startswith("be brief\n\nUser:")


def test_train_on_all(chatml: Any) -> None:
    features = one(Chat(train_on="all").open(chatml, length=LONG).encode({"messages": CHAT}).samples)
    assert features["labels"].tolist() == [*features["input_ids"][1:].tolist(), IGNORE]


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
def test_every_pair_form_is_the_same_conversation(chatml: Any, pair: tuple[str, str]) -> None:
    record = {pair[0]: "who are you", pair[1]: "the lazy dog", "id": 7, "system": "be brief"}
    assert isinstance(choose_encoder(record), Chat)
    features = one(Chat().open(chatml, length=LONG).encode(record).samples)
    assert features["labels"].tolist() == chatml_reference(CHAT[:3], chatml)[1]


def test_role_aliases_and_numbers(chatml: Any) -> None:
    for answering in ("gpt", "model"):
        messages = [{"role": "human", "content": "who are you"}, {"role": answering, "content": "the lazy dog"}]
        features = one(Chat().open(chatml, length=LONG).encode({"messages": messages}).samples)
        assert features["labels"].tolist() == chatml_reference(CHAT[1:3], chatml)[1]
    assert Chat().conversation({"problem": "6 x 7", "expected_answer": 42})[1]["content"] == "42"


def test_columns_can_be_named(chatml: Any) -> None:
    record = {"instruction": "say", "input": "hello", "output": "there"}
    named = Chat(question=["instruction", "input"], answer="output")
    assert [m["content"] for m in named.conversation(record)] == ["say\n\nhello", "there"]
    assert [m["content"] for m in Chat(question="q", answer="a").conversation({"q": "x", "a": "y", "input": "z"})] == [
        "x",
        "y",
    ]
    assert Chat().conversation({"question": "x", "answer": "y", "input": ""})[0]["content"] == "x"


@pytest.mark.parametrize(
    ("instruction", "more", "question"),
    [("say", "hello", "say\n\nhello"), ("say", "", "say"), ("say", None, "say"), ("", "hello", "hello")],
)
def test_instruction_input_and_output(instruction: str, more: str | None, question: str) -> None:
    record = {"instruction": instruction, "input": more, "output": "there"}
    assert isinstance(choose_encoder(record), Chat)
    assert Chat().conversation(record) == [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "there"},
    ]


def test_conversations_of_from_and_value(chatml: Any) -> None:
    speakers = {"system": "system", "user": "human", "assistant": "gpt"}
    record = {"id": 3, "conversations": [{"from": speakers[m["role"]], "value": m["content"]} for m in CHAT]}
    assert isinstance(choose_encoder(record), Chat)
    assert Chat().conversation(record) == CHAT
    features = one(Chat().open(chatml, length=LONG).encode(record).samples)
    assert features["labels"].tolist() == chatml_reference(CHAT, chatml)[1]


@pytest.mark.parametrize("blank", ["", " \n"])
def test_a_blank_answer_is_never_learned(chatml: Any, tokenizer: Any, blank: str) -> None:
    half = [*CHAT[:2], {"role": "assistant", "content": blank}, *CHAT[3:]]
    for own, said in ((chatml, " jumps\n\nover <|im_end|>"), (tokenizer, "  jumps\n\nover <eos>")):
        nothing = Chat().open(own, length=LONG).encode({"question": "who", "answer": blank})
        assert (nothing.samples, nothing.dropped) == ([], [NOTHING_LEARNED])
        assert own.decode(learned(one(Chat().open(own, length=LONG).encode({"messages": half}).samples))) == said
        every = one(Chat(train_on="all").open(own, length=LONG).encode({"question": "who", "answer": blank}).samples)
        assert (every["labels"][:-1] != IGNORE).all()


def test_the_layout_is_reported(chatml: Any, tokenizer: Any) -> None:
    plain = "chat template: plain (User: ... / Assistant: ...), "
    assert Chat().open(tokenizer, length=64).notes() == [plain + "because the tokenizer has no chat template"]
    assert Chat(template="plain").open(chatml, length=64).notes() == [plain + "as data.encode says"]
    assert Chat().open(chatml, length=64).notes() == ["chat template: the tokenizer's own"]
    assert Text().open(tokenizer, length=64).notes() == []


def test_a_conversation_without_an_answer_has_nothing_to_learn(chatml: Any) -> None:
    found = Chat().open(chatml, length=LONG).encode({"messages": CHAT[:2]})
    assert (found.samples, found.dropped) == ([], [NOTHING_LEARNED])


def test_chat_in_a_batch_equals_one_by_one(chatml: Any) -> None:
    records = [{"messages": CHAT}, {"question": "who", "answer": "you"}, {"messages": CHAT[:2]}]
    for record, samples in zip(records, Chat().open(chatml, length=LONG).encode_many(records), strict=True):
        single = Chat().open(chatml, length=LONG).encode(record)
        assert [s["labels"].tolist() for s in samples.samples] == [s["labels"].tolist() for s in single.samples]


def test_chat_faults(chatml: Any, tokenizer_with: Callable[..., Any]) -> None:
    def message(record: dict[str, Any], **settings: Any) -> str:
        return fault(lambda: Chat(**settings).open(chatml, length=LONG).encode(record).samples)

    nothing = message({"title": "x", "body": "y"})
    assert "no conversation found in the record. Keys found: 'title', 'body'. Accepted: chat:" in nothing
    assert "question/answer" in nothing
    assert "problem statement/solution" in nothing
    assert "not clear which columns" in message({"question": "x", "answer": "y", "expected_answer": "z"})
    assert "not clear which columns" in message({"instruction": "a", "input": "x", "output": "y", "response": "z"})
    assert "not clear which columns" in message({"instruction": "a", "input": "x", "output": "y", "question": "z"})
    assert "Keys found: 'question', 'answer' (null)." in message({"question": "x", "answer": None})
    shared = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
    assert "both 'messages' and 'conversations'" in message({"messages": CHAT, "conversations": shared})
    assert "'conversations' and a pair as well" in message({"conversations": shared, "question": "x", "answer": "y"})
    assert "message 1 must have 'from' and 'value', found 'role', 'content'" in message({"conversations": CHAT})
    assert "message 1 has the role 'bot'" in message({"conversations": [{"from": "bot", "value": "x"}]})
    assert "message 1 has the role ['user']" in message({"messages": [{"role": ["user"], "content": "x"}]})
    assert "message 1: 'value' must be a string, found a number" in message(
        {"conversations": [{"from": "gpt", "value": 1}]}
    )
    assert "'conversations' must be a list of at least one {from, value}" in message({"conversations": []})
    assert "'messages' and a pair as well" in message({"messages": CHAT, "question": "x", "answer": "y"})
    assert "'system' column and a system message" in message({"messages": CHAT, "system": "x"})
    assert "message 1 has the role 'bot'. Allowed: system, developer, user, assistant, tool, ipython, human" in message(
        {"messages": [{"role": "bot", "content": "x"}]}
    )
    assert "message 2 must have 'role' and 'content', found 'role'" in message(
        {"messages": [CHAT[1], {"role": "assistant"}]}
    )
    assert "message 1: 'content' must be a string, found a list" in message(
        {"messages": [{"role": "user", "content": []}]}
    )
    assert "must be a list of at least one" in message({"messages": []})
    assert "must be a list of at least one" in message({"messages": "hello"})
    assert "'answer' must be a string, found a list" in message({"question": "x", "answer": ["y"]})
    assert "names only one of question and answer" in message({"a": 1}, question="a")
    assert "no 'b' in the record" in message({"a": "1"}, question="a", answer="b")
    strict = tokenizer_with(chat_template="{{ raise_exception('roles must alternate') }}")
    assert "chat template refuses this conversation: roles must alternate" in fault(
        lambda: Chat().open(strict, length=LONG).encode({"messages": CHAT}).samples
    )


# --- choosing and batching


def test_the_first_record_decides_the_encoder() -> None:
    assert isinstance(choose_encoder({"text": "x", "id": 1}), Text)
    assert isinstance(choose_encoder({"input_ids": [1]}), Text)
    assert isinstance(choose_encoder({"messages": CHAT, "text": None}), Chat)
    unknown = fault(lambda: choose_encoder({"title": "x"}))
    assert "no known form. Keys found: 'title'. Accepted: " in unknown
    assert "; chat:" in unknown
    assert "; text:" in unknown
    assert "has the form of several encoders: chat and text" in fault(
        lambda: choose_encoder({"text": "x", "messages": CHAT})
    )
    assert {"chat", "text"} <= set(kinds(Encoder))
    assert decode(Encoder, "chat", where="data.encode") == Chat()


def test_transformers_keeps_padded_documents_apart() -> None:
    from transformers.masking_utils import find_packed_sequence_indices

    row = {
        "input_ids": np.array([5, 6, 7, 8]),
        "labels": np.array([6, IGNORE, 8, IGNORE]),
        "position_ids": np.array([0, 1, 0, 1]),
    }
    lone = {"input_ids": np.array([5, 6, 7]), "labels": np.array([6, 7, IGNORE])}
    batch = Text().collate([row, lone], length=6)
    assert all(batch[name].dtype == torch.int64 for name in ("input_ids", "labels", "position_ids"))
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 0, 0], [5, 6, 7, 0, 0, 0]]
    assert batch["labels"].tolist() == [[6, IGNORE, 8, IGNORE, IGNORE, IGNORE], [6, 7, *[IGNORE] * 4]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]
    assert find_packed_sequence_indices(batch["position_ids"]).tolist() == [[0, 0, 1, 1, 1, 1], [0] * 6]
    # Rows of one document each are plain causal rows, whatever their padding.
    assert find_packed_sequence_indices(Text().collate([lone, lone], length=6)["position_ids"]) is None
    assert Text().collate([row, lone], length=None)["input_ids"].shape == (2, 4)
    assert "a sample has 4 tokens, but rows have 3" in fault(lambda: Text().collate([row], length=3))


def test_the_plain_layout_goes_with_the_tokenizer(tokenizer: Any) -> None:
    """Whoever loads the export lays conversations out as in training; a template of its own is left alone."""
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    Chat().open(bare, length=64).annotate_processor()
    asked = bare.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert asked.startswith("User: Hi")
    assert asked.rstrip().endswith("Assistant:")
    own = copy.deepcopy(tokenizer)
    own.chat_template = "mine"
    Chat().open(own, length=64).annotate_processor()
    assert own.chat_template == "mine"
