"""Writes the golden values: what the built-in recipes, a resumed checkpoint, the schema and the command line give.

    python -m tests.golden.make losses FILE
    python -m tests.golden.make surface FOLDER
    python -m tests.golden.make checkpoint FOLDER

Uses public names only, so that it also runs against an older tree: put that tree before this one on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.shrunk_recipes import local_inputs, shrunk
from tests.small import model_folder, token_file

RANKS = {
    "diffusion": (1, 2),
    "embedding": (1, 2),
    "embedding-8b": (1,),
    "llm": (1,),
    "quickstart": (1, 2),
    "sft": (1,),
    "sft-lora": (1,),
}
"""Each built-in recipe runs on one rank; those that ship two ranks also run on two."""
CASES = [f"{name}-{ranks}" for name, numbers in RANKS.items() for ranks in numbers]
VERSIONS = ("torch", "transformers", "tokenizers", "diffusers", "peft", "sentence-transformers", "numpy")


def losses(case: str, local: Path, output: Path, *overrides: str) -> dict[str, list[Any]]:
    """What three steps of a shrunk recipe log: loss and gradient norm of every step, and validation losses."""
    import fullshard

    name, _, ranks = case.rpartition("-")
    settings = [*shrunk(name, local), f"topology.devices={ranks}", f"output={output}", f"data.cache={output}/cache"]
    if name == "quickstart":  # its own texts are Python's documentation, which differs between versions of Python
        settings.append(f"data.train={local}/texts")
    fullshard.train(fullshard.read(name, *settings, *overrides))
    return logged(output / name)


def logged(run: Path) -> dict[str, list[Any]]:
    """What a run has written to its metrics."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "train": [[record["loss"], record["grad_norm"]] for record in records if record["kind"] == "train"],
        "validation": [
            [record[key] for key in ("loss", "ema_loss") if key in record]
            for record in records
            if record["kind"] == "validation"
        ],
    }


def machine() -> dict[str, str]:
    """Where the values come from."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    versions = {name: metadata.version(name) for name in VERSIONS}
    return {"processor": processor, "python": platform.python_version(), **versions}


def write_losses(path: Path) -> None:
    """Every case in fp32, and as shipped where that is another precision."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        local = local_inputs(Path(folder) / "local")
        for case in CASES:
            found[case] = losses(case, local, Path(folder) / case, "precision=fp32")
            found[f"{case} as shipped"] = losses(case, local, Path(folder) / f"{case}-shipped")
    path.write_text(json.dumps(found, indent=1) + "\n")


STOP = 3
CHECKPOINT = f"checkpoint-{STOP}"
TINY = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "head_dim": 4}
RECIPE: dict[str, Any] = {
    "model": {"path": "model"},
    "data": {
        "train": "train.jsonl",
        "sequence_length": 48,
        "pack": False,
        "holdout": 0.25,
        "cache": "cache",
    },
    "batch": {"per_device": 4, "global": 16},
    "duration": {"steps": 6},
    "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
    "schedule": {"kind": "cosine", "warmup": 2},
    "ema": {"decay": 0.9, "evaluate": "both"},
    "precision": "fp32",
    "checkpoint": {"every_steps": STOP, "best": None},
    "evaluate": {"parts": ["loss"], "every_steps": 1},
    "log": {"every_steps": 1, "sinks": []},
}
"""A recipe of relative paths: it runs in whatever folder the checkpoint is copied to."""


def continued(name: str, ranks: int) -> dict[str, list[Any]]:
    """The rest of the run from the checkpoint in the current folder."""
    import fullshard

    recipe = fullshard.read(RECIPE | {"name": name, "topology": {"device": "cpu", "devices": ranks}})
    fullshard.train(recipe, resume=CHECKPOINT)
    return logged(Path("runs") / name)


def write_checkpoint(folder: Path) -> None:
    """A model, its data, a checkpoint that two ranks wrote, and what came of it when it went on."""
    import fullshard

    folder.mkdir(parents=True)
    os.chdir(folder)
    model_folder(Path("model"), **TINY)
    token_file(Path("train.jsonl"), records=100)
    recipe = fullshard.read(RECIPE | {"name": "whole", "topology": {"device": "cpu", "devices": 2}})
    fullshard.train(recipe)
    shutil.copytree(Path("runs") / "whole" / CHECKPOINT, CHECKPOINT)
    with tarfile.open(f"{CHECKPOINT}.tar.xz", "w:xz") as archive:  # 240 kB, most of them zeros
        archive.add(CHECKPOINT)
    whole = logged(Path("runs") / "whole")
    found = {"machine": machine(), "2": continued("on-2", 2), "1": continued("on-1", 1)}
    assert found["2"]["train"] == whole["train"][STOP:]
    Path("continued.json").write_text(json.dumps(found, indent=1) + "\n")
    for leftover in ("runs", "cache", CHECKPOINT):
        shutil.rmtree(leftover)


def commands() -> dict[str, list[str]]:
    """Every command and its options, from the parser rather than from the text of its help."""
    import typer

    from fullshard.cli import app

    found: dict[str, list[str]] = {}

    def walk(name: str, command: Any) -> None:
        found[name] = sorted({word for p in command.params for word in [*p.opts, *p.secondary_opts] if word[:1] == "-"})
        for below in sorted(command.list_commands(None)) if hasattr(command, "list_commands") else ():
            walk(f"{name} {below}", command.get_command(None, below))

    walk("fullshard", typer.main.get_command(app))
    return found


def schema() -> dict[str, Any]:
    """The JSON schema of a recipe, as the command prints it."""
    from typer.testing import CliRunner

    from fullshard.cli import app

    found: dict[str, Any] = json.loads(CliRunner().invoke(app, ["recipes", "schema"], catch_exceptions=False).stdout)
    return found


def without_text(schema: Any) -> Any:
    """A schema without its descriptions and titles: the words may change, what is accepted may not."""
    if isinstance(schema, list):
        return [without_text(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    words = {"description", "title"} if "type" in schema or "anyOf" in schema or "$ref" in schema else set()
    return {key: without_text(each) for key, each in schema.items() if key not in words or isinstance(each, dict)}


def write_surface(folder: Path) -> None:
    """The JSON schema of a recipe, and the commands with their options."""
    (folder / "schema.json").write_text(json.dumps(without_text(schema())) + "\n")
    (folder / "commands.json").write_text(json.dumps(commands(), indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    writers = {"losses": write_losses, "surface": write_surface, "checkpoint": write_checkpoint}
    writers[sys.argv[1]](Path(sys.argv[2]))
