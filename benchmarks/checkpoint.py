"""What saving costs: the Qwen3-1.7B shape on one GPU, with `fullshard train`, without saves, and with both kinds.

    python benchmarks/checkpoint.py              all three, and whether going on from a background save changes losses
    python benchmarks/checkpoint.py --runs none async

A checkpoint is 20.6 GB (fp32 parameters and Adam's state). The loop logs every ten steps, as by default; the stall of a
save is what the ten steps after it take more than the median ten steps without saves. The rate is over all steps after
WARMUP, saves included; its dip is against the run without saves, and within the run against the median ten steps that
do not follow a save. `--folder` says which disk; its speed is printed first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from llm import RECIPE, write_text  # noqa: E402

WARMUP = 30  # compile, and a GPU that is not warm yet and clocks higher
WINDOW = 10


def disk_speed(folder: Path, gigabytes: int = 4) -> float:
    """GB/s of writing with fsync, as a save does it."""
    block = os.urandom(1 << 26)
    begun = time.perf_counter()
    with (folder / "probe").open("wb") as file:
        for _ in range(gigabytes * 1_000_000_000 // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begun
    (folder / "probe").unlink()
    return gigabytes / seconds


def run(folder: Path, name: str, *overrides: str, resume: str = "never") -> list[dict[str, Any]]:
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder))
    command = [sys.executable, "-m", "fullshard", "train", str(recipe), f"name={name}", f"log.every_steps={WINDOW}"]
    command += [*overrides, "--resume", resume]
    print("$", " ".join(command[2:]), flush=True)
    with (folder / f"{name}.txt").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT)
    said = (folder / f"{name}.txt").read_text()
    print("\n".join(line for line in said.splitlines() if "Saved" in line or "waited" in line or "ackground" in line))
    if done.returncode:
        print(said[-3000:])
        raise SystemExit(done.returncode)
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def windows_of(records: list[dict[str, Any]]) -> dict[int, float]:
    """How long each ten steps took, by their last one, with what happened in between."""
    ends = {r["step"]: r["seconds"] for r in records if r["kind"] == "train"}
    return {step: ends[step] - ends[step - WINDOW] for step in ends if step - WINDOW >= WARMUP and step % WINDOW == 0}


def row(label: str, records: list[dict[str, Any]], base: tuple[float, float] | None) -> tuple[float, float]:
    """Prints a line; returns tokens per second and the median seconds of ten steps. `base` is that without saves."""
    windows = windows_of(records)
    tokens = {r["step"]: r["tokens"] for r in records if r["kind"] == "train"}
    rate = (tokens[max(windows)] - tokens[WARMUP]) / sum(windows.values())
    median = statistics.median(windows.values())
    saves = [r for r in records if r.get("event") == "saved" and r["step"] + WINDOW in windows]
    stalls = [windows[r["step"] + WINDOW] - (base[1] if base else median) for r in saves]
    dip = f"{1 - rate / base[0]:.2%}" if base else "-"
    after = {r["step"] + WINDOW for r in saves}
    quiet = [seconds for step, seconds in windows.items() if saves and step not in after]
    inside = f"{1 - statistics.median(quiet) / statistics.mean(windows.values()):.2%}" if quiet else "-"
    worst = f"{max(stalls):.2f}" if stalls else "-"
    blocked = f"{max(r['stall_seconds'] for r in saves):.3f}" if saves else "-"
    steps = len(windows) * WINDOW
    cells = [label, steps, len(saves), f"{rate:,.0f}", dip, inside, f"{median / WINDOW:.3f}", worst, blocked]
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
    print("ten steps each:", " ".join(f"{seconds:.2f}" for seconds in windows.values()), file=sys.stderr, flush=True)
    return rate, median


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", nargs="*", default=["none", "async", "resume", "sync"])
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--set", nargs="*", default=[], help="further key=value settings of every run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        write_text(folder)
        print(
            f"{shutil.disk_usage(folder).free / 1e9:.0f} GB free, written at {disk_speed(folder):.2f} GB/s", flush=True
        )
        same = ["batch.per_device=8", "checkpoint.keep=1", "checkpoint.best=null", *options.set]
        results: dict[str, list[dict[str, Any]]] = {}
        if "none" in options.runs:
            results["no saves"] = run(folder, "none", *same, "duration.steps=110")
        for name, wanted, steps in (("async", "true", 230), ("sync", "false", 60)):
            if name in options.runs:
                saving = [f"checkpoint.asynchronous={wanted}", "checkpoint.every_steps=50", f"duration.steps={steps}"]
                label = "in the background" if name == "async" else "training waits"
                results[label] = run(folder, name, *same, *saving)
                if name == "async" and "resume" in options.runs:
                    resumed = run(
                        folder, "resumed", *same, "duration.steps=230", resume=str(folder / "runs" / name / "last")
                    )
                    results["went on from the last background save"] = resumed
                shutil.rmtree(folder / "runs" / name)
        heads = ["saves", "steps", "saves", "tokens/s", "dip", "within the run", "median step s", "worst stall s"]
        print(f"| {' | '.join(heads)} | host blocked s |")
        print("|---|---|---|---|---|---|---|---|---|")
        base: tuple[float, float] | None = None
        for label, records in results.items():
            if "went on" not in label:
                found = row(label, records, base)
                base = found if label == "no saves" else base
        if "went on from the last background save" in results:
            straight = {r["step"]: r["loss"] for r in results["in the background"] if r["kind"] == "train"}
            again = [r for r in results["went on from the last background save"] if r["kind"] == "train"]
            apart = max(abs(r["loss"] / straight[r["step"]] - 1) for r in again if r["step"] in straight)
            print(
                f"losses of steps {again[0]['step']} to {again[-1]['step']} after the resume: at most {apart:.1e} apart"
            )


if __name__ == "__main__":
    main()
