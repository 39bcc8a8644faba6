"""Trains the Qwen3-1.7B shape on one GPU with `fullshard train` and prints tokens per second, MFU and memory.

    python benchmarks/llm.py                 one rank, then two ranks sharing the GPU over gloo, and their losses
    python benchmarks/llm.py --only one      the speed alone

Real text (Python's language reference) from disk, tokenised, packed into rows of 4,096; fp32 parameters, gradients and
Adam states; bf16 compute; clipping on; every step reads its data through the ordinary loader. The first steps (compile)
are left out of the rate: it is the median over the steps after WARMUP.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WARMUP = 11
TABLES: list[str] = []
MEASURED_MATMUL = 790e12  # a large bf16 product on the same H200; 989e12 is the data sheet's


def write_text(folder: Path, *, copies: int = 8) -> Path:
    from pydoc_data.topics import topics

    path = folder / "reference.jsonl"
    # Several copies: an epoch should be longer than the benchmark. None: a small part.
    lines = [json.dumps({"text": topics[key]}) for key in sorted(topics)]
    path.write_text("\n".join(lines * copies if copies else lines[:40]) + "\n")
    return path


RECIPE = """
output: {folder}/runs
model:
  architecture: qwen3
  size: 1.7B
  overrides: {{vocab_size: 151936}}
  tokenizer: {{train: {{vocab_size: 32000}}}}
data: {{train: {folder}/reference.jsonl, cache: {folder}/cache, sequence_length: 4096, holdout: 0}}
duration: {{steps: 61}}
precision: bf16
optimizer: {{lr: 3e-4, clip: 1.0}}
schedule: {{kind: cosine, warmup: 10}}
checkpoint: {{every_epochs: null, at_end: false}}
evaluate: {{parts: []}}
log: {{every_steps: 10, sinks: []}}
"""


def run(folder: Path, name: str, *overrides: str, kind: str = "train") -> list[dict[str, Any]]:
    """Trains with `fullshard train`; the records of one kind."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder))
    command = [sys.executable, "-m", "fullshard", "train", str(recipe), f"name={name}", *overrides, "--resume", "never"]
    print("$", " ".join(command[2:]), flush=True)
    subprocess.run(command, check=True)
    records = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(folder / "runs" / name)
    return [record for record in records if record["kind"] == kind]


def row(label: str, records: list[dict[str, Any]]) -> None:
    steady = [r for r in records if r["step"] > WARMUP and "tokens_per_second" in r]
    speed = statistics.median(r["tokens_per_second"] for r in steady)
    mfu = statistics.median(r.get("mfu", 0.0) for r in steady)
    memory = max(r["memory_gib"] for r in records)
    wait = statistics.median(r["data_wait"] for r in steady)
    print(f"| {label} | {speed:,.0f} | {mfu:.1%} | {mfu * 989e12 / MEASURED_MATMUL:.1%} | {memory:.1f} | {wait:.2%} |")


def compare(folder: Path, precision: str, *overrides: str) -> None:
    """The losses of one rank, and of two ranks that share the GPU."""
    same = [f"precision={precision}", "duration.steps=6", "log.every_steps=1", "sharding.strategy=full", *overrides]
    alone = run(folder, "alone", "topology.devices=1", *same)
    shared = run(folder, "shared", "topology.devices=2", "topology.backend=gloo", *same)
    lines = [f"\n| step | one rank, {precision} | two ranks, one GPU, gloo | apart |\n|---|---|---|---|"]
    for a, b in zip(alone, shared, strict=True):
        lines.append(f"| {a['step']} | {a['loss']:.6f} | {b['loss']:.6f} | {abs(a['loss'] / b['loss'] - 1):.1e} |")
    TABLES.append("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=["one", "two", "all"], default="all")
    parser.add_argument("--steps", type=int, default=61)
    parser.add_argument("--set", nargs="*", default=[], help="further key=value settings of every run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_text(folder)
        results: dict[str, list[dict[str, Any]]] = {}
        if options.only in ("one", "all"):
            steps = f"duration.steps={options.steps}"
            results["one rank, batch 8"] = run(folder, "one", "batch.per_device=8", steps, *options.set)
        if options.only in ("two", "all"):
            compare(folder, "bf16", "batch.global=8", "batch.per_device=4", *options.set)
            compare(folder, "fp32", "batch.global=2", "batch.per_device=1", *options.set)
        print("\n".join(TABLES))
        print(
            "\n| run | tokens/s | of 989 TFLOP/s | of 790 measured | peak GiB | data wait |\n|---|---|---|---|---|---|"
        )
        for label, records in results.items():
            row(label, records)


if __name__ == "__main__":
    main()
