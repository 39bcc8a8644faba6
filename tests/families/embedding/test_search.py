"""Retrieval on a corpus of its own: the numbers of sentence-transformers' evaluator, graded nDCG of scikit-learn, on
any number of ranks; BEIR's and TREC's files, tables; and files that do not fit together."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fullshard.config.part import decode
from fullshard.contracts.data import Source
from fullshard.errors import DataError
from fullshard.families.embedding.relevance_files import read_judgements
from tests.families.embedding import texts
from tests.ranks import RankPool
from tests.small import train

DOCUMENTS, QUERIES = 43, 11
NAMES = ["recall@1", "recall@3", "recall@10", "mrr@10", "ndcg@10"]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def beir(folder: Path) -> dict[str, dict[str, int]]:
    """A benchmark with titles, documents judged irrelevant, and a query that nobody judged."""
    draw = random.Random(3)
    corpus = []
    for i in range(DOCUMENTS):
        # Two words tell each from all others: equal scores would be a matter of taste.
        own = f"{texts.WORDS[i % 40]} {texts.WORDS[(i * 7 + i // 40) % 40]}"
        title = texts.text(draw, i) if i % 3 else ""
        corpus.append({"_id": f"d{i}", "title": title, "text": f"{texts.text(draw, i)} {own}"})
    write(folder / "corpus.jsonl", corpus)
    write(folder / "queries.jsonl", [{"_id": f"q{i}", "text": texts.text(draw, i)} for i in range(QUERIES + 1)])
    qrels = {
        f"q{i}": {f"d{n}": draw.choice([0, 1, 1, 2, 3]) for n in draw.sample(range(DOCUMENTS), 5)} | {f"d{i}": 1}
        for i in range(QUERIES)
    }
    lines = [f"{query}\t{doc}\t{score}" for query, found in qrels.items() for doc, score in found.items()]
    (folder / "qrels").mkdir()
    (folder / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n")
    return qrels


def source(path: Path) -> Any:
    return decode(Source, str(path), where="corpus")


def judged(folder: Path, **changed: Any) -> Any:
    given = {"corpus": folder / "corpus.jsonl", "queries": folder / "queries.jsonl", "qrels": folder / "qrels/test.tsv"}
    given |= changed
    return read_judgements(source(given["corpus"]), source(given["queries"]), str(given["qrels"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search")
    texts.encoder(path / "model", num_hidden_layers=1)
    texts.pairs(path / "train.jsonl", records=16)
    beir(path)
    return path


def by_others(folder: Path, model: Path) -> dict[str, float]:
    """Recall and MRR by sentence-transformers' evaluator; nDCG with grades by scikit-learn, query by query."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    from sklearn.metrics import ndcg_score

    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / name).read_text().splitlines()]

    corpus = {row["_id"]: f"{row['title']} {row['text']}".strip() for row in rows("corpus.jsonl")}
    queries = {row["_id"]: row["text"] for row in rows("queries.jsonl")}
    qrels: dict[str, dict[str, float]] = {}
    with (folder / "qrels/test.tsv").open() as file:
        for row in csv.DictReader(file, delimiter="\t"):
            qrels.setdefault(row["query-id"], {})[row["corpus-id"]] = float(row["score"])
    relevant = {query: {doc for doc, score in found.items() if score > 0} for query, found in qrels.items()}
    loaded = SentenceTransformer(str(model), device="cpu")
    settings = {"mrr_at_k": [10], "ndcg_at_k": [10], "map_at_k": [10], "precision_recall_at_k": [1, 3, 10]}
    found = InformationRetrievalEvaluator(queries, corpus, relevant, accuracy_at_k=[1], **settings)(loaded)
    numbers = {name: found[f"cosine_{name}"] for name in NAMES[:-1]}
    asked = [query for query in queries if relevant.get(query)]
    vectors = [
        loaded.encode(list(some), normalize_embeddings=True) for some in ([queries[q] for q in asked], corpus.values())
    ]
    truth = [[max(qrels[query].get(doc, 0), 0) for doc in corpus] for query in asked]
    return numbers | {"ndcg@10": float(ndcg_score(np.array(truth), vectors[0] @ vectors[1].T, k=10))}


def test_the_metrics_equal_reference_libraries_on_any_number_of_ranks(ranks: RankPool, folder: Path) -> None:
    part = {"kind": "search", "at": [1, 3, 10], "batch_size": 4, "dims": [16, 5], "name": "toy"}
    part |= {name: str(folder / f"{name}.jsonl") for name in ("corpus", "queries")} | {
        "qrels": str(folder / "qrels/test.tsv")
    }
    found = {}
    for world in (1, 2, 4):
        sections = {"duration": {"steps": 1}, "evaluate": {"at_start": True, "parts": [part]}}
        sections |= {"checkpoint": {"best": {"metric": "toy/ndcg@10"}, "every_epochs": None}}
        records = ranks.run(train, texts.recipe(folder, name=f"on-{world}", **sections), world=world)[0]
        found[world] = [record for record in records if record["kind"] == "validation"]
    expected = by_others(folder, folder / "model")
    after = by_others(folder, folder / "runs/on-1/model")
    assert 0.05 < expected["ndcg@10"] < 0.95
    for world, (start, end) in found.items():
        for name in NAMES:
            assert start[f"toy/{name}"] == pytest.approx(expected[name], abs=1e-6), (world, name)
            assert end[f"toy/{name}"] == pytest.approx(after[name], abs=1e-6), (world, name)
            assert 0 < start[f"toy/{name}/5"] <= 1


def test_every_file_format_gives_the_same_judgements(folder: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = judged(folder)
    assert (len(first.documents), len(first.queries)) == (DOCUMENTS, QUERIES)
    assert first.notes == [f"1 query in queries is left out: no relevant document in {folder / 'qrels/test.tsv'}"]
    rows = [line.split("\t") for line in (folder / "qrels/test.tsv").read_text().splitlines()[1:]]
    (tmp_path / "trec.txt").write_text("".join(f"{query} 0 {doc} {score}\n" for query, doc, score in rows))
    write(tmp_path / "qrels.jsonl", [{"query_id": q, "doc_id": d, "relevance": int(s)} for q, d, s in rows])
    table = {"query-id": [r[0] for r in rows], "corpus-id": [r[1] for r in rows], "score": [int(r[2]) for r in rows]}
    pq.write_table(pa.table(table), tmp_path / "qrels.parquet")
    with (tmp_path / "qrels.csv").open("w") as file:
        csv.writer(file).writerows([["query-id", "corpus-id", "score"], *rows])
    for name in ("trec.txt", "qrels.jsonl", "qrels.parquet", "qrels.csv"):
        other = judged(folder, qrels=tmp_path / name)
        assert other.queries == first.queries
        for ours, theirs in zip(first.relevant + first.gains, other.relevant + other.gains, strict=True):
            assert np.array_equal(ours, theirs), name


def test_files_that_do_not_fit_together(folder: Path, tmp_path: Path) -> None:
    def qrels(*lines: str) -> Path:
        (tmp_path / "q.tsv").write_text("\n".join(lines) + "\n")
        return tmp_path / "q.tsv"

    cases = {
        r"2 of the 3 relevant documents in it are not in the corpus of 43, such as 'x', 'y'": qrels(
            "q0\td1\t1", "q0\tx\t1", "q0\ty\t1"
        ),
    }
    for match, path in cases.items():
        with pytest.raises(DataError, match=match):
            judged(folder, qrels=path)
    with pytest.raises(DataError, match=r"no relevant document for any of the 12 queries in queries.*'z0'.*'q0'"):
        judged(folder, qrels=qrels("z0\td1\t1"))
    with pytest.raises(DataError, match="no relevant document for any of the 12 queries"):
        judged(folder, qrels=qrels("q0\td1\t0"))
    with pytest.raises(DataError, match="no judgement"):
        judged(folder, qrels=qrels("query-id\tcorpus-id\tscore"))
    with pytest.raises(DataError, match="q.tsv:2: the score 'high' is not a number"):
        judged(folder, qrels=qrels("q0\td1\t1", "q0\td2\thigh"))
    with pytest.raises(DataError, match="q.tsv:1: found 2 columns"):
        judged(folder, qrels=qrels("q0\t1"))
    with pytest.raises(DataError, match="cannot be read"):
        judged(folder, qrels=tmp_path / "nowhere.tsv")
    with pytest.raises(DataError, match="the id 'd0' appears twice in corpus"):
        judged(folder, corpus=write(tmp_path / "c.jsonl", [{"_id": "d0", "text": "ban"}] * 2))
    with pytest.raises(DataError, match="no text in this record of corpus"):
        judged(folder, corpus=write(tmp_path / "c.jsonl", [{"_id": "d0", "body": "ban"}]))
    with pytest.raises(DataError, match="an id of queries is missing"):
        judged(folder, queries=write(tmp_path / "c.jsonl", [{"text": "ban"}]))
    # Judged irrelevant: not there to be found, and not missed.
    assert len(judged(folder, qrels=qrels("q0\td1\t1", "q0\tx\t0")).queries) == 1
    found = judged(folder, qrels=qrels("q0\td1\t1", "q99\td2\t1"))
    assert found.notes[1] == f"1 query of {tmp_path / 'q.tsv'} is left out: not in queries"
    assert torch.tensor(found.relevant[0]).tolist() == [1]
