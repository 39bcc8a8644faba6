"""Runs of the real command with faults in them, and whether they equal a straight one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.reader import open_tensors
from fullshard.log.metrics import FILE, read
from tests.small import curve, model_folder, recipe, token_file

ROOT = Path(__file__).parents[2]
STEPS = 12
KEYS = ("step", "loss", "grad_norm", "lr", "samples", "tokens")
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


def inputs(folder: Path) -> Path:
    """A model and data for the runs."""
    model_folder(folder / "model", num_hidden_layers=1, attention_dropout=0.2)
    token_file(folder / "train.jsonl", records=64)
    return folder


def settings(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    base = {
        "objective": {"kind": "tests.dist.faulty_objective.Faulty"},
        "data": {"shuffle": True, "workers": 1},
        "batch": {"per_device": 2, "global": 8},
        "duration": {"steps": STEPS},
        "topology": {"device": "cpu", "devices": 2, "timeout_s": 60},
        "checkpoint": {"every_steps": 1, "every_epochs": None, "best": None, "keep": 2},
    }
    return recipe(folder, name=name, **{**base, **sections})


def environ(faults: Sequence[dict[str, Any]] = (), **more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    return {**clean, "PYTHONPATH": str(ROOT), "FAULTS": json.dumps(list(faults)), **more}


def train(
    folder: Path,
    name: str,
    *words: str,
    faults: Sequence[dict[str, Any]] = (),
    sections: dict[str, Any] | None = None,
    **more: str,
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The command; gives its end and its run folder."""
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(settings(folder, name, **(sections or {}))))
    command = [sys.executable, "-m", "fullshard", "train", str(file), *words]
    done = subprocess.run(
        command, cwd=ROOT, env=environ(faults, **more), capture_output=True, text=True, timeout=500, check=False
    )
    return done, folder / "runs" / name


def assert_equal_runs(found: Path, straight: Path, *, steps: int = STEPS) -> None:
    """Every logged number and every saved byte."""
    ours, theirs = (curve(read(run / FILE), *KEYS) for run in (found, straight))
    assert [row[0] for row in ours] == list(range(1, steps + 1))
    assert ours == theirs
    saved, expected = (open_tensors(run / f"checkpoint-{steps}") for run in (found, straight))
    assert saved.names() == expected.names()
    for name in expected.names():
        assert torch.equal(saved.whole(name), expected.whole(name)), name
    exported = [(run / "model" / "model.safetensors").read_bytes() for run in (found, straight)]
    assert exported[0] == exported[1]


def restarts(run: Path) -> list[dict[str, Any]]:
    """The restarts that the metrics of a run tell of."""
    return [record for record in read(run / FILE) if record.get("event") == "restart"]
