"""The page of embedding models: its recipe trains and its commands run as written, on a small model; every setting
decodes, and its tables list what there is."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml
from typer.testing import CliRunner

import fullshard
from fullshard.cli import app
from fullshard.config.part import decode, kinds
from fullshard.families.embedding.models.sentence_transformer import SentenceTransformer
from fullshard.log.metrics import FILE
from fullshard.log.metrics import read as read_metrics
from fullshard.similarity.base import NegativeScope, SimilarityLoss
from tests.families.embedding import texts

PAGE = (Path(fullshard.__file__).parent / "families" / "embedding" / "README.md").read_text()
INSIDE = {"{kind: spearman}": "evaluate.parts=[{}]", "negatives: shared": "objective.loss.{}"}
"""Where a setting belongs that the page gives without its section."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def commands() -> list[str]:
    return [line for line in "\n".join(blocks("bash")).splitlines() if line]


def settings(text: str = PAGE) -> list[str]:
    """What stands in a sentence as `key: value`, in the form of the command line."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    found = re.findall(r"`([\w.]+: [^`]+|\{[^`]+: [^`]+\})`", prose)
    return [
        INSIDE.get(span, "{}").format(span if span.startswith("{") else span.replace(": ", "=", 1)) for span in found
    ]


def table(head: str) -> list[list[str]]:
    """The cells of each row below the head that begins so."""
    rows = PAGE.partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def command(line: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *more: str) -> str:
    """What a command says, which ends well."""
    words = [*shlex.split(line), *more]
    monkeypatch.setattr(sys, "argv", words)
    result = CliRunner().invoke(app, words[1:], catch_exceptions=False)
    said = result.output + capfd.readouterr().out
    assert result.exit_code == 0, said
    return said


def test_the_recipe_trains_and_its_model_mines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the page's own settings of validation; the hub model is a small one of the same width."""
    texts.decoder(
        tmp_path / "Qwen" / "Qwen3-Embedding-0.6B", hidden_size=1024, num_hidden_layers=1, max_position_embeddings=512
    )
    rows = texts.pairs(tmp_path / "train.jsonl", records=60, negatives=(0,))
    (tmp_path / "recipe.yaml").write_text(blocks("yaml")[0])
    monkeypatch.chdir(tmp_path)
    section = PAGE.partition("## Validation")[2]
    validation = [word for word in settings(section) if "spearman" not in word]
    command("fullshard train recipe.yaml", capfd, monkeypatch, *validation)
    records = [r for r in read_metrics(Path("runs/my-embedder") / FILE) if r["kind"] == "validation"]
    assert [record["step"] for record in records] == [0, 1]
    named = set(re.findall(r"`(\w+@[\w/]+)`", section))
    assert named
    assert named <= records[1].keys()
    [mine] = [line for line in commands() if line.startswith("fullshard mine")]
    assert f"Wrote mined.jsonl, {len(rows)} pairs" in command(mine, capfd, monkeypatch)


def test_the_built_in_recipe_does_what_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """That it trains, and that recall rises, is shown in tests/families/embedding/test_minilm.py."""
    monkeypatch.chdir(tmp_path)
    assert "fullshard train embedding" in commands()
    said = command("fullshard train embedding", capfd, monkeypatch, "--dry-run")
    assert "x 2 ranks" in said
    stated = yaml.safe_load(said)
    assert (stated["topology"]["device"], stated["evaluate"]["at_start"]) == ("cpu", True)
    assert [part["kind"] for part in stated["evaluate"]["parts"]] == ["retrieval"]


def test_no_command_is_left_out() -> None:
    assert [line.split(" runs/")[0] for line in commands()] == ["fullshard train embedding", "fullshard mine"]


@pytest.mark.parametrize("block", blocks("yaml"))
def test_every_block_decodes(block: str) -> None:
    """A whole recipe, or sections that replace those of the first."""
    fullshard.read(yaml.safe_load(blocks("yaml")[0]) | yaml.safe_load(block))


@pytest.mark.parametrize("setting", settings())
def test_every_setting_decodes(setting: str) -> None:
    fullshard.read(yaml.safe_load(blocks("yaml")[0]), setting)


def test_the_table_of_losses() -> None:
    rows = {kind.strip("`"): (does, needs) for kind, does, needs in table("`objective.loss`")}
    assert sorted(rows) == kinds(SimilarityLoss)
    for kind, (does, needs) in rows.items():
        loss = decode(SimilarityLoss, kind)
        wants = {"negatives": loss.requires_negatives(), "labels": loss.needs_labels, "teacher": loss.needs_teacher}
        assert {word: word in needs for word in wants} == wants, kind
        assert set(re.findall(r"`(\w+)`", does)) <= {*type(loss).model_fields, *get_args(NegativeScope)}, kind


def test_the_table_of_model_keys() -> None:
    named = {name for row in table("key of `model`") for name in re.findall(r"`(\w+)`", row[0])}
    assert {"pooling", "normalize"} <= named <= SentenceTransformer.model_fields.keys()
