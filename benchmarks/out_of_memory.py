"""`batch.per_device: auto` and `batch.on_oom: split` on a real GPU, which is filled for real.

    python benchmarks/out_of_memory.py            Qwen3-1.7B shapes on one GPU
    python benchmarks/out_of_memory.py --ranks 8  the same on eight
    python benchmarks/out_of_memory.py --tiny     a tiny model on two CPU ranks, where the error is raised on purpose

Runs, each in processes of its own:

    auto         the largest micro-batch that fits, by trial
    fixed        that number in the recipe: the losses must be equal
    larger       the next larger number, with on_oom: stop: it must run out of memory, else `auto` chose too little
    filled       on rank 0 a tensor takes nearly all free memory before some step, with on_oom: split
    smaller      the number that `filled` ended with, from that step on: the losses must be equal

The table has the number of rows, trials, seconds before step 1, tokens per second, memory, and what a split cost.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from llm import RECIPE, write_text  # noqa: E402

from fullshard.contracts.objective import Batch, Terms  # noqa: E402
from fullshard.families.language.objectives.causal_lm import CausalLM  # noqa: E402

STEPS, FILL_AT = 8, 4
REAL = ["model.size=1.7B", "batch.global=256", "sharding.activation_checkpointing=none"]
TINY = ["model.size=tiny", "data.sequence_length=128", "topology.device=cpu", "topology.devices=2", "precision=fp32"]
TINY += ["batch.global=32", "model.tokenizer.train.vocab_size=2000", "model.overrides.vocab_size=2000"]
ALWAYS = [f"duration.steps={STEPS}", "log.every_steps=1", "log.sinks=[]", "evaluate.parts=[]", "data.holdout=0"]
ALWAYS += ["checkpoint.best=null", "checkpoint.every_epochs=null", "checkpoint.keep=null", "sharding.compile=false"]


class Filling(CausalLM):
    """The usual loss; before one pass rank 0 loses all free memory but `left_gib`. On a CPU it runs out on purpose."""

    at_pass: int
    left_gib: float = 1.0
    fits: int = 1
    """On a CPU: rows in a micro-batch that fit from then on."""

    def loss(self, model: nn.Module, batch: Batch, aux: dict[str, nn.Module]) -> Terms:
        if torch.is_grad_enabled() and os.environ.get("RANK", "0") == "0":
            passes.append(1)
            device = batch["input_ids"].device
            if len(passes) >= self.at_pass and device.type == "cpu" and len(batch["input_ids"]) > self.fits:
                raise torch.OutOfMemoryError("out of memory, on purpose")
            if len(passes) == self.at_pass and device.type == "cuda":
                torch.cuda.empty_cache()
                free, _ = torch.cuda.mem_get_info(device)
                taken.append(torch.empty(free - int(self.left_gib * 2**30), dtype=torch.uint8, device=device))
        return super().loss(model, batch, aux)


passes: list[int] = []
taken: list[torch.Tensor] = []


def run(folder: Path, name: str, settings: list[str], *, resume: str = "never") -> dict[str, Any]:
    """One run: its records, its log and how it ended."""
    command = [sys.executable, "-m", "fullshard", "train", str(folder / "recipe.yaml"), f"name={name}"]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    begun = time.perf_counter()
    done = subprocess.run(
        [*command, *settings, "--resume", resume, "--resume-anyway"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    place = folder / "runs" / name
    lines = (place / "metrics.jsonl").read_text().splitlines() if (place / "metrics.jsonl").exists() else []
    records = [json.loads(line) for line in lines]
    steps = [record for record in records if record["kind"] == "train"]
    return {
        "code": done.returncode,
        "said": " ".join((done.stdout + done.stderr).split()),
        "events": [record for record in records if record.get("event") == "out_of_memory"],
        "losses": {record["step"]: record["loss"] for record in steps},
        "speeds": [record.get("tokens_per_second", 0) for record in steps],
        "gib": max((record.get("memory_gib", 0) for record in steps), default=0),
        "seconds": {record["step"]: record["seconds"] for record in steps},
        "whole": time.perf_counter() - begun,
    }


def apart(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest difference of the losses of steps that both have; infinite if there is none."""
    steps = one.keys() & other.keys()
    return max(abs(one[step] - other[step]) / abs(other[step]) for step in steps) if steps else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--left", type=float, default=1.0, help="GiB that the tensor leaves free")
    parser.add_argument("--set", nargs="*", default=[], help="more settings for every run")
    options = parser.parse_args()
    common = [*ALWAYS, *(TINY if options.tiny else [*REAL, f"topology.devices={options.ranks}"]), *options.set]
    share = int(next(s for s in reversed(common) if s.startswith("batch.global=")).split("=")[1])
    share //= 2 if options.tiny else options.ranks
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_text(folder)
        (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
        _report(folder, common, share=share, left=options.left)


def _report(folder: Path, common: list[str], *, share: int, left: float) -> None:
    auto = run(folder, "auto", [*common, "batch.per_device=auto"])
    found = re.search(r"batch\.per_device = auto is (\d+) rows?: (.*?) \((\d+) trials?\)", auto["said"])
    assert found, auto["said"][-3000:]
    size = int(found[1])
    print(f"auto: {size} rows, {found[2]}, {found[3]} trial(s); {auto['gib']:.1f} GiB, {auto['speeds'][-1]:,.0f} tok/s")
    fixed = run(folder, "fixed", [*common, f"batch.per_device={size}"])
    print(f"fixed: {size} rows; losses differ by {apart(auto['losses'], fixed['losses']):.1e}; took ", end="")
    print(f"{fixed['whole']:.0f} s, and {auto['whole']:.0f} s with trials and the encoding of the data")
    if next_size := next((n for n in range(size + 1, share + 1) if share % n == 0), None):
        larger = run(folder, "larger", [*common, f"batch.per_device={next_size}"])
        memory = "out of memory" in larger["said"].lower()
        print(f"larger: {next_size} rows: exit code {larger['code']}, out of memory: {memory}")
    filling = ["objective.kind=out_of_memory.Filling", f"objective.at_pass={(FILL_AT - 1) * share // size + 1}"]
    filling += [f"objective.left_gib={left}", f"objective.fits={max(size // 2, 1)}", "batch.on_oom=split"]
    saves = [f"checkpoint.every_steps={FILL_AT - 1}"]
    filled = run(folder, "filled", [*common, *saves, f"batch.per_device={size}", *filling])
    assert filled["code"] == 0, filled["said"][-3000:]
    assert filled["events"], "the memory that was left was enough: lower --left"
    after = filled["events"][-1]["per_device"]
    at = filled["events"][0]["step"]
    seconds = [filled["seconds"][step] - filled["seconds"][step - 1] for step in (at + 1, at + 3)]
    print(f"filled: {size} to {after} rows in {len(filled['events'])} split(s) after step {at}; ", end="")
    print(f"that step took {seconds[0]:.1f} s, a later one {seconds[1]:.1f} s")
    begin = str(folder / "runs" / "filled" / f"checkpoint-{FILL_AT - 1}")
    smaller = run(folder, "smaller", [*common, f"batch.per_device={after}"], resume=begin)
    assert smaller["code"] == 0, smaller["said"][-3000:]
    later = {step: loss for step, loss in filled["losses"].items() if step > at}
    print(f"smaller: {after} rows from step {FILL_AT}; losses differ by {apart(later, smaller['losses']):.1e}")


if __name__ == "__main__":
    main()
