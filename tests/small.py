"""Small real things that several tests train: a model folder, token files, and a run on given ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

VOCABULARY = 97  # odd, so that no number of ranks divides it


def model_folder(folder: Path, *, tied: bool = True, **changes: Any) -> Path:
    """A tiny Qwen3 with fixed random weights, saved by Transformers."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    }
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(Qwen3Config(**settings | changes)).save_pretrained(folder)
    return folder


def token_file(path: Path, *, records: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Pre-tokenised records of very uneven lengths, with structure that can be learned."""
    draw = random.Random(seed)
    rows = []
    for _ in range(records):
        start, step = draw.randrange(VOCABULARY), draw.choice([1, 2, 3])
        length = draw.choice([3, 5, 9, longest])
        rows.append([(start + step * i) % VOCABULARY for i in range(length)])
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return rows


def recipe(folder: Path, **sections: Any) -> dict[str, Any]:
    """A recipe over `folder/model` and `folder/train.jsonl` that logs every step and keeps to the order of the file."""
    base: dict[str, Any] = {
        "output": str(folder / "runs"),
        "model": {"path": str(folder / "model")},
        "data": {
            "train": str(folder / "train.jsonl"),
            "sequence_length": 48,
            "pack": False,
            "shuffle": False,
            "holdout": 0,
            "cache": str(folder / "cache"),
        },
        "batch": {"per_device": 4, "global": 16},
        "duration": {"steps": 6},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
        "schedule": {"kind": "linear"},
        "precision": "fp32",
        "topology": {"device": "cpu"},
        "log": {"every_steps": 1, "sinks": []},
        "evaluate": {"parts": []},
        "checkpoint": {"every_epochs": None, "best": None},
    }
    for name, values in sections.items():
        merged = {**base[name], **values} if isinstance(values, dict) and isinstance(base.get(name), dict) else values
        base[name] = merged
    return base


def train(settings: dict[str, Any], resume: str = "auto") -> list[dict[str, Any]]:
    """One rank of a run; gives the records of metrics.jsonl on rank 0. Sent to the rank pool by name."""
    import os

    from fullshard.log.metrics import FILE, read
    from fullshard.recipes.read import read as read_recipe
    from fullshard.run import execute

    reading = read_recipe(settings)
    execute(reading, resume=resume)
    return read(reading.recipe.folder / FILE) if os.environ.get("RANK", "0") == "0" else []


def curve(records: list[dict[str, Any]], *keys: str) -> list[tuple[float, ...]]:
    """The logged numbers of every step."""
    return [tuple(record[key] for key in keys) for record in records if record["kind"] == "train"]
