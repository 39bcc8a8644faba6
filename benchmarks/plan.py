"""Runs a list of differing recipes on one GPU and prints the memory that `fullshard plan` predicts beside the real one.

    python benchmarks/plan.py                  every run, each in its own process, and the table
    python benchmarks/plan.py --only lora DiT  runs whose names hold one of these words
    python benchmarks/plan.py --together 3     up to three at a time, as far as their predictions fit on the GPU
    python benchmarks/plan.py --dry            the predictions alone, without a GPU

Real is `torch.cuda.max_memory_allocated` and `max_memory_reserved` after a few steps through the ordinary command's own
path; other processes on the GPU are not in it. Models have random weights; texts are Python's language reference, pairs
and latents are random.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

STEPS = 4
GIB = 2**30
READY = "READY"
Pair = tuple[float, float]


def _llm(size: str, rows: int, length: int, **more: Any) -> dict[str, Any]:
    model = {
        "architecture": "qwen3",
        "size": size,
        "overrides": {"vocab_size": 151936},
        "tokenizer": {"train": {"vocab_size": 32000}},
        **more.pop("model", {}),
    }
    data = {"train": "reference.jsonl", "sequence_length": length, "holdout": 0, **more.pop("data", {})}
    return {"model": model, "data": data, "batch": {"per_device": rows}, **more}


def _embedding(pairs: int, chunk: int | None) -> dict[str, Any]:
    return {
        "model": {
            "kind": "sentence_transformer",
            "architecture": "qwen3",
            "size": "0.6B",
            "overrides": {"vocab_size": 151936},
            "tokenizer": {"train": {"vocab_size": 32000}},
        },
        "objective": {"kind": "contrastive", **({"cache": {"chunk": chunk}} if chunk else {})},
        "data": {"train": "pairs.jsonl", "sequence_length": 128, "holdout": 0},
        "batch": {"per_device": pairs},
    }


def _dit(**more: Any) -> dict[str, Any]:
    shape = {"in_channels": 4, "out_channels": 4, "sample_size": 32}
    return {
        "model": {"kind": "diffusers", "architecture": "dit", "size": "XL/2", "classes": 1000, "overrides": shape},
        "objective": {"kind": "flow_matching"},
        "data": {"train": "latents.csv", "encode": {"kind": "image", "root": "."}, "holdout": 0, "pack": False},
        "batch": {"per_device": 256},
        **more,
    }


def _again(mode: str, **more: Any) -> dict[str, Any]:
    return {"sharding": {"activation_checkpointing": mode, **more}}


LORA = {"lora": {"r": 16}}
PURE = {"precision": "bf16-pure"}
RUNS: dict[str, dict[str, Any]] = {
    "1.7B, 8 x 4,096": _llm("1.7B", 8, 4096),
    "1.7B, 4 x 4,096": _llm("1.7B", 4, 4096),
    "1.7B, 1 x 8,192": _llm("1.7B", 1, 8192),
    "1.7B, 16 x 512": _llm("1.7B", 16, 512),
    "1.7B, 16 x 2,048, selective": _llm("1.7B", 16, 2048, **_again("selective")),
    "1.7B, 16 x 4,096, full": _llm("1.7B", 16, 4096, **_again("full")),
    "1.7B, 4 x 4,096, not compiled": _llm("1.7B", 4, 4096, **_again("none", compile=False)),
    "1.7B, 8 x 4,096, not compiled, full": _llm("1.7B", 8, 4096, **_again("full", compile=False)),
    "1.7B, 8 x 2,048, padded": _llm("1.7B", 8, 2048, data={"pack": False}),
    "1.7B, 8 x 4,096, average": _llm("1.7B", 8, 4096, ema=0.999),
    "1.7B, 8 x 4,096, 8-bit states": _llm("1.7B", 8, 4096, optimizer={"kind": "adamw_8bit"}),
    "1.7B, 8 x 4,096, Muon": _llm("1.7B", 8, 4096, optimizer={"kind": "muon"}),
    "1.7B, 4 x 4,096, 2 micro-batches": _llm("1.7B", 4, 4096) | {"batch": {"per_device": 4, "accumulate": 2}},
    "1.7B, 2 x 4,096, offload": _llm("1.7B", 2, 4096, **_again("none", cpu_offload=True)),
    "1.7B, 8 x 4,096, grad_op": _llm("1.7B", 8, 4096, **_again("none", strategy="grad_op")),
    "8B lora, 2 x 4,096": _llm("8B", 2, 4096, model=LORA),
    "8B lora, 4 x 4,096": _llm("8B", 4, 4096, model=LORA),
    "8B lora, 8 x 4,096, full": _llm("8B", 8, 4096, model=LORA, **_again("full")),
    "8B bf16-pure, 4 x 4,096, full": _llm("8B", 4, 4096, **PURE, **_again("full")),
    "8B bf16-pure, 1 x 8,192, selective": _llm("8B", 1, 8192, **PURE, **_again("selective")),
    "8B bf16-pure, 2 x 2,048": _llm("8B", 2, 2048, **PURE),
    "8B 8-bit states, 2 x 4,096, full": _llm("8B", 2, 4096, optimizer={"kind": "adamw_8bit"}, **_again("full")),
    "embedding 0.6B, 2,048 pairs, chunk 128": _embedding(2048, 128),
    "embedding 0.6B, 2,048 pairs, chunk 512": _embedding(2048, 512),
    "embedding 0.6B, 256 pairs": _embedding(256, None),
    "DiT-XL/2, 256 images": _dit(),
    "DiT-XL/2, 256 images, average": _dit(ema=0.999),
    "DiT-XL/2, 256 images, selective": _dit(**_again("selective")),
}


def recipe(name: str, folder: Path) -> dict[str, Any]:
    """The whole recipe of a run."""
    found: dict[str, Any] = json.loads(json.dumps(RUNS[name]))
    for key, value in (("train", found["data"]["train"]), ("cache", "cache")):
        found["data"][key] = str(folder / value)
    if "encode" in found["data"]:
        found["data"]["encode"]["root"] = str(folder)
    usual = {
        "name": "".join(letter if letter.isalnum() else "-" for letter in name),
        "output": str(folder / "runs"),
        "precision": "bf16",
        "duration": {"steps": STEPS},
        "checkpoint": {"every_epochs": None, "at_end": False, "best": None},
        "evaluate": {"parts": []},
        "log": {"every_steps": 1, "sinks": []},
    }
    return {**usual, **found}


def write_data(folder: Path) -> None:
    from pydoc_data.topics import topics

    import numpy as np

    lines = [json.dumps({"text": topics[key]}) for key in sorted(topics)]
    (folder / "reference.jsonl").write_text("\n".join(lines * 16) + "\n")
    draw = random.Random(0)
    words = " ".join(topics[key] for key in sorted(topics)).split()

    def text() -> str:
        return " ".join(draw.choices(words, k=200))

    pairs = [json.dumps({"query": text(), "positive": text()}) for _ in range(2048 * STEPS)]
    (folder / "pairs.jsonl").write_text("\n".join(pairs) + "\n")
    with (folder / "latents.csv").open("w") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "label"])
        for index in range(512):
            np.save(folder / f"{index}.npy", np.random.default_rng(index).normal(size=(4, 32, 32)).astype("float32"))
            rows.writerow([f"{index}.npy", index % 1000])


def predicted(name: str, folder: Path, gpu: str) -> Pair:
    """GiB that are allocated at the peak, and that torch reserves."""
    from fullshard.plan.hardware import gpu_named
    from fullshard.plan.predict import Place, Planner
    from fullshard.recipes.read import read_recipe

    found = Planner().predict(read_recipe(recipe(name, folder)), Place(1, 1, gpu_named(gpu)))
    allocated = found.peak.memory.total
    return allocated / GIB, (allocated + found.outside["fragmentation"]) / GIB


def measure(name: str, folder: Path) -> None:
    """Trains in this process once a line comes in, and prints what torch counted."""
    import torch
    import torch._dynamo  # what a run imports later

    from fullshard.recipes.read import read
    from fullshard.run import execute

    reading = read(recipe(name, folder))
    print(READY, flush=True)
    sys.stdin.readline()
    execute(reading, resume="never")
    print(json.dumps([torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB]))


class Runs:
    """Runs side by side as far as their predictions fit on one GPU; none begins after the last minute."""

    def __init__(self, folder: Path, gib: float, *, minutes: float) -> None:
        self._folder, self._left, self._all = folder, gib, gib
        self._end = time.monotonic() + 60 * minutes
        self._free = threading.Condition()

    def measure(self, name: str, plan: Pair) -> Pair | None:
        """A process that imports at once, and takes memory when there is room."""
        needs = min(plan[1] * 1.1 + 1.0, self._all)
        words = [sys.executable, __file__, "--one", name, "--folder", str(self._folder)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(words, text=True, **pipes)
        while process.stdout and (line := process.stdout.readline()) and line.strip() != READY:
            pass
        with self._free:
            self._free.wait_for(lambda: self._left >= needs)
            if time.monotonic() > self._end:
                process.kill()
                return None
            self._left -= needs
        try:
            said, _ = process.communicate("\n")
        finally:
            with self._free:
                self._left += needs
                self._free.notify_all()
        if process.returncode:
            print(f"{name}: failed\n{said[-2500:]}", flush=True)
            return None
        allocated, reserved = json.loads(said.strip().splitlines()[-1])
        return allocated, reserved


def row(name: str, plan: Pair, found: Pair | None) -> str:
    if found is None:
        return f"| {name} | {plan[0]:.1f} | | | {plan[1]:.1f} | | |"
    errors = [f"{guess / value - 1:+.1%}" for guess, value in zip(plan, found, strict=True)]
    return f"| {name} | {plan[0]:.1f} | {found[0]:.1f} | {errors[0]} | {plan[1]:.1f} | {found[1]:.1f} | {errors[1]} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="names of runs, or words in them, in this order")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="no run begins later")
    parser.add_argument("--one")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.one:
        measure(options.one, options.folder)
        return
    words = ([word] if word in RUNS else [name for name in RUNS if word in name] for word in options.only)
    names = list(dict.fromkeys(name for found in words for name in found))
    with tempfile.TemporaryDirectory() as temporary:
        table = compare(names, Path(temporary), options)
    print("| run | predicted GiB | allocated | error | predicted | reserved | error |\n|---|---|---|---|---|---|---|")
    print("\n".join(row(name, *table[name]) for name in names))
    for index, what in enumerate(("allocated", "reserved")):
        errors = [abs(plan[index] / found[index] - 1) for plan, found in table.values() if found]
        if errors:
            print(f"{what}: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}, {len(errors)} runs")


def compare(names: list[str], folder: Path, options: argparse.Namespace) -> dict[str, tuple[Pair, Pair | None]]:
    """What is predicted, and what is real."""
    if not options.dry:
        write_data(folder)
    with concurrent.futures.ProcessPoolExecutor(min(4 * options.together, os.cpu_count() or 1)) as pool:
        plans = dict(
            zip(names, pool.map(predicted, names, [folder] * len(names), [options.gpu] * len(names)), strict=True)
        )
    print(f"predicted {len(names)} runs", flush=True)
    runs = Runs(folder, 124.0, minutes=options.minutes)

    def measured(name: str) -> Pair | None:
        begun = time.monotonic()
        found = None if options.dry else runs.measure(name, plans[name])
        print(row(name, plans[name], found), f"{time.monotonic() - begun:.0f} s", flush=True)
        return found

    with concurrent.futures.ThreadPoolExecutor(options.together) as threads:
        return {name: (plans[name], found) for name, found in zip(names, threads.map(measured, names), strict=True)}


if __name__ == "__main__":
    main()
