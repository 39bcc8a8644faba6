"""Small runs of every CUDA path, each checked against fp32 on the same GPU: what a CPU cannot show.

    python benchmarks/cuda.py [images]

Prints a table: run, last loss, distance from the fp32 reference, seconds. Exits 1 when a run fails or strays.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

RECIPE: dict[str, Any] = {
    "model": {"architecture": "qwen3", "size": "tiny", "tokenizer": {"train": {"vocab_size": 1024}}},
    "data": {"train": {"kind": "python_reference"}, "sequence_length": 256},
    "batch": {"per_device": 4, "global": 8},
    "duration": {"steps": 12},
    "optimizer": {"lr": 3e-3},
    "log": {"every_steps": 1, "sinks": []},
    "sharding": {"compile": False},
    "evaluate": {"parts": [{"kind": "loss"}]},
}

RUNS: dict[str, tuple[list[str], float]] = {  # overrides, allowed distance of the last loss from the reference
    "fp32": (["precision=fp32"], 0.0),
    "bf16, varlen attention": (["precision=bf16"], 0.02),
    "bf16, sdpa": (["precision=bf16", "model.attention=sdpa"], 0.02),
    "bf16, compiled": (["precision=bf16", "sharding.compile=true"], 0.02),
    "bf16, FlashAttention-4 where installed": (["precision=bf16", "model.attention=flash_attention_4"], 0.02),
    "float8, emulated, compiled": (["precision=float8-emulated", "sharding.compile=true"], 0.05),
    "fp16 with scaler": (["precision=fp16"], 0.02),
    "full recompute": (["precision=bf16", "sharding.activation_checkpointing=full"], 0.02),
    "selective recompute": (["precision=bf16", "sharding.activation_checkpointing=selective"], 0.02),
    "selective, compiled": (
        ["precision=bf16", "sharding.activation_checkpointing=selective", "sharding.compile=true"],
        0.02,
    ),
    "CPU offload, clipped": (["precision=fp32", "sharding.cpu_offload=true"], 1e-4),
    "replicated": (["precision=fp32", "sharding.strategy=none"], 1e-4),
    "not packed": (["precision=bf16", "data.pack=false", "data.sequence_length=128"], 10.0),
    "8-bit AdamW": (["precision=bf16", "optimizer.kind=adamw_8bit"], 0.05),
    "loader workers": (["precision=fp32", "data.workers=2"], 1e-4),
}
IMAGES: dict[str, Any] = {
    **RECIPE,
    "model": {**RECIPE["model"], "kind": "vlm", "architecture": "qwen2_5_vl"},
    "objective": "vision_lm",
    "data": {"train": {"kind": "shapes", "records": 256}, "sequence_length": 256, "shuffle": False},
}
IMAGE_RUNS: dict[str, tuple[list[str], float]] = {
    "images, fp32, packed": (["precision=fp32"], 0.0),
    "images, bf16, varlen attention": (["precision=bf16"], 0.02),
    "images, bf16, sdpa": (["precision=bf16", "model.attention=sdpa"], 0.02),
    "images, fp16 with scaler": (["precision=fp16"], 0.02),
    "images, frozen tower, full recompute": (
        ["precision=bf16", "model.towers={vision: {freeze: true}}", "sharding.activation_checkpointing=full"],
        0.05,
    ),
    "images, loader workers": (["precision=fp32", "data.workers=2"], 1e-4),
}


def run(folder: Path, name: str, recipe: dict[str, Any], overrides: list[str]) -> float:
    from fullshard.recipes.read import read
    from fullshard.run import execute

    settings = {**recipe, "name": name, "output": str(folder / "runs")}
    settings["data"] = {**recipe["data"], "cache": str(folder / "cache")}
    reading = read(settings, *overrides)
    execute(reading, resume="never")
    lines = (reading.recipe.folder / "metrics.jsonl").read_text().splitlines()
    return float([r for r in map(json.loads, lines) if r["kind"] == "train"][-1]["loss"])


def main() -> None:
    failed, rows, reference = False, [], 0.0
    runs = [(IMAGES, *each) for each in IMAGE_RUNS.items()]
    if "images" not in sys.argv[1:]:
        runs = [(RECIPE, *each) for each in RUNS.items()] + runs
    with tempfile.TemporaryDirectory() as temporary:
        for number, (recipe, label, (overrides, allowed)) in enumerate(runs):
            begun = time.monotonic()
            reference = reference if allowed else 0.0  # a reference of its own begins each recipe
            try:
                loss = run(Path(temporary), f"run-{number}", recipe, overrides)
            except Exception:
                traceback.print_exc()
                rows.append(f"| {label} | failed | | |")
                failed = True
                continue
            reference = reference or loss
            apart = abs(loss / reference - 1)
            failed |= apart > allowed
            mark = "" if apart <= allowed else " TOO FAR"
            rows.append(f"| {label} | {loss:.5f} | {apart:.1e}{mark} | {time.monotonic() - begun:.1f} |")
            print(rows[-1], flush=True)
    print("\n| run | last loss | from fp32 | seconds |\n|---|---|---|---|\n" + "\n".join(rows))
    sys.exit(failed)


if __name__ == "__main__":
    main()
