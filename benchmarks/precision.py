"""bf16 and fp16 against fp32 on one GPU, 50 steps each: full, LoRA, recompute, compile, CPU offload, two ranks.

    python benchmarks/precision.py [LABEL ...]

Every run starts from the same weights and sees the same samples as its fp32 reference. The distance is that of the loss
averaged over five steps: the largest of the run, and the last. Prints a table; exits 1 when a run fails or leaves the
band.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

BAND = 0.02
"""The largest distance from fp32 that a run may have at any step, relative."""
STEPS, WINDOW = 50, 5
LONGEST_S = 120
RECIPE: dict[str, Any] = {
    "model": {
        "architecture": "qwen3",
        "size": "tiny",
        "overrides": {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
        "tokenizer": {"train": {"vocab_size": 4096}},
    },
    "data": {"train": {"kind": "python_reference"}, "sequence_length": 512},
    "batch": {"per_device": 4, "global": 8},
    "duration": {"steps": STEPS},
    "optimizer": {"lr": 1e-3},
    "schedule": {"kind": "cosine", "warmup": 10},
    "log": {"every_steps": 1, "sinks": []},
    "sharding": {"compile": False},
    "evaluate": {"parts": []},
    "checkpoint": {"every_epochs": None, "best": None},
}
KINDS: dict[str, list[str]] = {
    "full": [],
    "LoRA": ["model.lora=16"],
    "activation checkpointing": ["sharding.activation_checkpointing=full"],
    "compile": ["sharding.compile=true"],
    "CPU offload": ["sharding.cpu_offload=true"],
    "two ranks, one GPU": ["topology.devices=2", "topology.backend=gloo"],
    "LoRA, two ranks": ["model.lora=16", "topology.devices=2", "topology.backend=gloo"],
    "LoRA, recompute": ["model.lora=16", "sharding.activation_checkpointing=full"],
    "LoRA, CPU offload": ["model.lora=16", "sharding.cpu_offload=true"],
    "selective, compiled": ["sharding.activation_checkpointing=selective", "sharding.compile=true"],
    "LoRA, compiled": ["model.lora=16", "sharding.compile=true"],
}


def run(folder: Path, name: str, settings: list[str], model: Path | None) -> tuple[list[float], dict[str, Any]]:
    """The loss of every step, and the last record. One rank runs in this process, several start their own."""
    recipe = {**RECIPE, "name": name, "output": str(folder / "runs")}
    recipe["data"] = {**RECIPE["data"], "cache": str(folder / "cache")}
    if model is not None:
        recipe["model"] = {"path": str(model)}
    if "topology.devices=2" in settings:
        file = folder / f"{name}.yaml"
        file.write_text(json.dumps(recipe))  # JSON is YAML
        command = [sys.executable, "-m", "fullshard", "train", str(file), *settings]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST_S)
        if done.returncode:
            raise RuntimeError(f"{done.stdout[-500:]}{done.stderr[-1500:]}")
    else:
        from fullshard.recipes.read import read
        from fullshard.run import execute

        with (folder / "console.txt").open("a") as console, contextlib.redirect_stdout(console):
            execute(read(recipe, *settings), resume="never")
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    return [record["loss"] for record in records], records[-1]


def smooth(losses: list[float]) -> list[float]:
    return [sum(losses[i - WINDOW : i]) / WINDOW for i in range(WINDOW, len(losses) + 1)]


def main() -> None:
    failed = False
    print(f"| run | precision | last loss | most apart (band {BAND:g}) | last apart | skipped | seconds |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        full, _ = run(folder, "full-fp32", ["precision=fp32"], None)
        model = folder / "runs" / "full-fp32" / "model"
        lora, _ = run(folder, "lora-fp32", ["precision=fp32", "model.lora=16"], model)
        references = {"full": smooth(full), "LoRA": smooth(lora)}
        for label, reference in references.items():
            print(f"| {label} | fp32 | {reference[-1]:.4f} | | | | |", flush=True)
        chosen = {label: settings for label, settings in KINDS.items() if len(sys.argv) == 1 or label in sys.argv[1:]}
        for number, (label, settings) in enumerate(chosen.items()):
            reference, start = (references["LoRA"], model) if label.startswith("LoRA") else (references["full"], None)
            for precision in ("bf16", "fp16"):
                begun, name = time.monotonic(), f"{number}-{precision}"
                try:
                    losses, last = run(folder, name, [f"precision={precision}", *settings], start)
                except Exception:
                    traceback.print_exc()
                    print(f"| {label} | {precision} | failed | | | | |", flush=True)
                    failed = True
                    continue
                apart = [abs(ours / theirs - 1) for ours, theirs in zip(smooth(losses), reference, strict=True)]
                failed |= max(apart) > BAND
                far = "" if max(apart) <= BAND else " TOO FAR"
                facts = [label, precision, f"{smooth(losses)[-1]:.4f}", f"{max(apart):.1e}{far}", f"{apart[-1]:.1e}"]
                facts += [str(last.get("skipped_steps", "")), f"{time.monotonic() - begun:.0f}"]
                print(f"| {' | '.join(facts)} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
