"""Model cards: what they state, as huggingface_hub reads it, and that nobody's README is lost."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from fullshard.card import write as writing
from fullshard.card.facts import Exported, is_hub_name, public, settings
from fullshard.card.load_code import load_code
from fullshard.card.text import card
from fullshard.contracts.model import Family


class Loaded(Family):
    """A family whose folders `torch.load` reads."""

    loader = "transformers.AutoModel.from_pretrained"
    path: str | None = None

    def adapters(self, module: torch.nn.Module) -> set[str]:
        return {"bias"}


Loaded.__module__ = "fullshard.families.loaded"


def exported(run: Path, *, form: str = "whole", step: int = 4, **recipe: Any) -> Exported:
    state = {
        "progress": {"step": 6, "samples": 24, "tokens": 300, "seconds": 75.0},
        "world_size": 2,
        "recipe": {"name": "mine", "model": {"kind": "hf", "architecture": "qwen3", "size": "tiny"}, **recipe},
        "data": {"/home/me/texts/a.jsonl": {"records": 1200, "size_bytes": 3 * 2**20}},
        "identity": {"samples": 640},
    }
    return Exported(Loaded(), torch.nn.Linear(3, 2), state, step, form, averaged=False, run=run)


def test_a_card_states_what_the_run_did(tmp_path: Path) -> None:
    records = [
        {"kind": "validation", "step": 2, "loss": 3.5, "epoch": 0.5},
        {"kind": "train", "step": 4, "loss": 2.25, "tokens_per_second": 10.0},
        {"kind": "validation", "step": 4, "loss": 2.5, "accuracy": 0.75, "epoch": 1.0},
        {"kind": "validation", "step": 6, "loss": 9.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"torn')
    text = card(exported(tmp_path, optimizer={"kind": "adamw", "lr": 1e-3}), tmp_path)
    assert "a whole model, with the weights of step 4 of 6" in text
    assert "Training started from random weights (qwen3, tiny)" in text
    assert "| a.jsonl | 1,200 | 3.0 MiB |" in text
    assert "6 steps over 24 rows and 300 tokens in 01:15 on 2 ranks" in text
    assert "640 rows" in text
    assert "| loss | 2.5 |\n| accuracy | 0.75 |" in text, "of the exported step, not of a later one"
    assert "training loss up to step 4 is 2.2500" in text
    assert "lr: 0.001" in text
    assert "/home/me" not in text


def test_front_matter_is_what_the_hub_reads(tmp_path: Path) -> None:
    data = {"train": {"kind": "mixture", "parts": [{"source": {"kind": "hub", "name": "owner/texts"}}]}}
    model = {"kind": "hf", "path": "owner/base"}
    (tmp_path / "tokenizer_config.json").touch()
    found = ModelCard(card(exported(tmp_path, form="adapter", model=model, data=data), tmp_path))
    assert found.data.to_dict() == {
        "library_name": "transformers",
        "base_model": "owner/base",
        "base_model_relation": "adapter",
        "datasets": ["owner/texts"],
        "tags": ["fullshard", "lora"],
    }
    assert "tokenizer = transformers.AutoTokenizer.from_pretrained('.')" in found.text


@pytest.mark.parametrize("name", ["x: [", "---\nlicense: mit", "<script>alert(1)</script>", "a | b\n# c", "```\n# d"])
def test_names_never_become_markup(tmp_path: Path, name: str) -> None:
    given = exported(tmp_path, model={"kind": "hf", "path": f"/models/{name}"}, data={"train": name})
    given.state["recipe"]["name"] = name  # type: ignore[index]
    object.__setattr__(given, "state", {**given.state, "data": {name: {"records": 1, "size_bytes": None}}})
    found = ModelCard(card(given, tmp_path))
    assert found.data.to_dict().keys() == {"library_name", "tags"}
    tokens = MarkdownIt("commonmark").enable("table").parse(found.text)
    every = [*tokens, *(inner for token in tokens for inner in token.children or ())]
    assert [token.tag for token in tokens if token.type == "heading_open"] == ["h1"] + ["h2"] * 6
    assert not [token for token in every if token.type.startswith(("html", "link", "em", "strong"))]
    assert [token.info for token in tokens if token.type == "fence"] == ["python", "yaml"]
    assert sum(token.type == "td_open" for token in tokens) == 3


def test_a_damaged_state_still_gives_a_card(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe{\x00")
    empty = Exported(Loaded(), torch.nn.Linear(1, 1), {"data": [], "recipe": None}, 0, "whole", False, tmp_path)
    text = card(empty, tmp_path)
    assert "The run measured nothing up to this step." in text
    assert yaml.safe_load(text.split("---")[1])["tags"] == ["fullshard"]


def test_folders_and_passwords_stay_here(tmp_path: Path) -> None:
    assert public("/home/me/data/a.jsonl") == "a.jsonl"
    assert public("~/models/base/") == "base"
    assert public("s3://key:secret@bucket/a?token=1") == "s3://bucket/a"
    assert public("owner/model") == "owner/model"
    assert is_hub_name("owner/model")
    assert not is_hub_name(str(tmp_path))
    kept = settings({"output": "/home/me", "data": {"train": ["/home/me/a.txt"], "cache": None}, "seed": 0})
    assert kept == {"data": {"train": ["a.txt"]}, "seed": 0}


def test_the_code_has_one_line_for_each_thing(tmp_path: Path) -> None:
    line = "pipeline = diffusers.DiffusionPipeline.from_pretrained('a; b'); pipeline.load_lora_weights('.')"
    assert load_code(line, tmp_path, place=".").splitlines() == [
        "import diffusers",
        "pipeline = diffusers.DiffusionPipeline.from_pretrained('a; b')",
        "pipeline.load_lora_weights('.')",
    ]
    (tmp_path / "preprocessor_config.json").touch()
    (tmp_path / "tokenizer_config.json").touch()
    assert load_code("peft.Auto.from_pretrained('.')", tmp_path, place=".").splitlines() == [
        "import peft, transformers",
        "model = peft.Auto.from_pretrained('.')",
        "processor = transformers.AutoProcessor.from_pretrained('.')",
    ]


def test_an_edited_readme_is_never_replaced(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    assert writing.write_card(before, exported(tmp_path)) is None
    assert writing.write_card(after, exported(tmp_path, step=6), before=before) is None, "as it was written: replaced"
    assert "step 6" in (after / "README.md").read_text()
    edited = (before / "README.md").read_text().replace("# license: fill this in", "license: mit #")
    (before / "README.md").write_text(edited)
    (after / "README.md").unlink()
    said = writing.write_card(after, exported(tmp_path, step=6), before=before)
    assert said is not None
    assert "README.new.md" in said
    assert (after / "README.md").read_text() == edited
    assert "step 6" in (after / "README.new.md").read_text()


def test_a_librarys_readme_is_replaced_and_that_of_an_own_family_is_not(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("Generated by a library.")
    writing.write_card(tmp_path, exported(tmp_path))
    assert "# mine" in (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text("Written by my family.")
    own: Any = SimpleNamespace()
    given = exported(tmp_path)
    object.__setattr__(given, "family", own)
    assert writing.write_card(tmp_path, given) is None
    assert (tmp_path / "README.md").read_text() == "Written by my family."
