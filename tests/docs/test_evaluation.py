"""docs/evaluation.md: its commands run as written on a small run; its recipe for a corpus is measured."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fullshard.cli import app
from tests.docs.test_readme import _tokenizer
from tests.families.embedding import texts
from tests.small import model_folder

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def commands() -> list[str]:
    return [line.partition("  #")[0].strip() for line in "".join(blocks("bash")).splitlines()]


def call(line: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    words = shlex.split(line)
    monkeypatch.setattr(sys, "argv", words)
    result = CliRunner().invoke(app, words[1:], catch_exceptions=False)
    said = result.stdout + capfd.readouterr().out
    assert result.exit_code == 0, result.output
    return said


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def short(name: str, **sections: Any) -> str:
    """A recipe of one step on one rank."""
    base: dict[str, Any] = {
        "name": name,
        "duration": {"steps": 1},
        "batch": {"per_device": 4},
        "precision": "fp32",
        "topology": {"device": "cpu", "devices": 1},
        "log": {"sinks": []},
    }
    return json.dumps({**base, **sections})


@pytest.mark.slow
def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "base", vocab_size=1200, max_position_embeddings=1024, num_hidden_layers=1)
    _tokenizer(tmp_path / "base")
    pairs = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}."} for n in range(12)]
    for name in ("train", "other"):
        write(tmp_path / f"{name}.jsonl", pairs)
    Path("prompts.txt").write_text("What is 4 + 1?\nWhat is 6 + 1?\n")
    data = {"train": "train.jsonl", "validation": "other.jsonl", "cache": "cache", "sequence_length": 64}
    Path("r.yaml").write_text(short("my-model", model={"path": "base", "lora": 2}, data=data))
    call("fullshard train r.yaml", capfd, monkeypatch)
    said = {line: call(line, capfd, monkeypatch) for line in commands()}
    assert len(said) == 9
    for line, words in said.items():
        if "evaluate" in line:
            assert "perplexity" in words, line
        elif "--json" not in line:
            assert "token" in words, line
    [as_json] = [json.loads(words) for line, words in said.items() if "--checkpoint 1 --json" in line]
    assert (as_json["step"], as_json["ranks"]) == (1, 1)


def test_the_corpus_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts.encoder(tmp_path / "model", num_hidden_layers=1)
    rows = texts.pairs(tmp_path / "train.jsonl", records=12)
    write(
        tmp_path / "scifact/corpus.jsonl",
        [{"_id": f"{n}", "title": "", "text": row["positive"]} for n, row in enumerate(rows)],
    )
    write(tmp_path / "scifact/queries.jsonl", [{"_id": f"{n}", "text": row["query"]} for n, row in enumerate(rows)])
    qrels = tmp_path / "scifact/qrels/test.tsv"
    qrels.parent.mkdir()
    qrels.write_text("query-id\tcorpus-id\tscore\n" + "".join(f"{n}\t{n}\t1\n" for n in range(12)))
    evaluate = yaml.safe_load(blocks("yaml")[0])["evaluate"]
    data = {"train": "train.jsonl", "holdout": 0, "cache": "cache", "sequence_length": 24}
    model = {"kind": "sentence_transformer", "path": "model"}
    best = {"best": {"metric": "scifact/ndcg@10"}}
    settings = {"model": model, "objective": {"kind": "contrastive"}, "data": data, "checkpoint": best}
    Path("r.yaml").write_text(short("search", evaluate=evaluate, **settings))
    said = call("fullshard train r.yaml", capfd, monkeypatch)
    names = re.findall(r"`(scifact/[\w@]+)`", PAGE)
    assert len(names) == 5
    for name in names:
        assert name in said, name
