"""Host memory of a run with `fullshard train`: Qwen3-8B and 1.7B shapes on one GPU, all parameters trained.

    python benchmarks/host_memory.py             8B in bf16-pure with two workers, 1.7B with 0 and 2; one save each
    python benchmarks/host_memory.py --runs 8B-8bit
    python benchmarks/host_memory.py --tiny      the same table from tiny models on a CPU, in a minute or two

Once a second, over all processes of the run: the sum of their PSS (each shared page counted once) and the host's
MemAvailable. Staging is what the mapping for background saves holds, as the kernel says (the one that is kept out of
forks), against the bytes of the checkpoint. The stall is how long the call that saves holds the loop up, and what the
steps around it take more than the median step. A run that is killed is a row too.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from llm import RECIPE, write_text  # noqa: E402

GIB = 2**30
# One save, in the background, well after the first step; a second one at the end would fill a disk of 64 GiB.
SAVED = ["checkpoint.every_steps={save}", "checkpoint.keep=1", "checkpoint.best=null", "checkpoint.asynchronous=true"]
FULL_8B = ["model.size=8B", "batch.per_device=4", "sharding.activation_checkpointing=full"]
RUNS: dict[str, list[str]] = {
    "8B": [*FULL_8B, "precision=bf16-pure", "data.workers=2", "duration.steps=30", *SAVED],
    "8B-8bit": [
        *FULL_8B,
        "precision=bf16-pure",
        "optimizer.kind=adamw_8bit",
        "data.workers=2",
        "duration.steps=30",
        *SAVED,
    ],
    "1.7B-0": ["batch.per_device=8", "data.workers=0", "duration.steps=30", *SAVED],
    "1.7B-2": ["batch.per_device=8", "data.workers=2", "duration.steps=30", *SAVED],
    "1.7B-unsaved": ["batch.per_device=8", "data.workers=2", "duration.steps=15"],
}
TINY = ["model.size=tiny", "data.sequence_length=128", "batch.per_device=2", "topology.device=cpu", "precision=fp32"]
TINY += [
    "sharding.activation_checkpointing=none",
    "model.tokenizer.train.vocab_size=2000",
    "model.overrides.vocab_size=2000",
]


@dataclass
class Seen:
    """The most that was seen of the processes of a run."""

    pss: int = 0
    staging: int = 0
    processes: int = 0
    least_left: int = 2**62
    left_before: int = 0
    series: list[tuple[float, float]] = field(default_factory=list)


def descendants(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        each = waiting.pop()
        found.append(each)
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                waiting += map(int, children.read_text().split())
            except OSError:
                continue
    return found


def number(path: Path, pattern: str) -> int:
    """Bytes, where the kernel says kB; 0 for a process that has ended."""
    try:
        return 1024 * sum(int(size) for size in re.findall(pattern, path.read_text(), re.MULTILINE))
    except OSError:
        return 0


def staging_of(pid: int) -> int:
    """What the mappings that are kept out of forks hold of memory of their own: the copy for a background save."""
    try:
        parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text(), flags=re.MULTILINE)
    except OSError:
        return 0
    held = 0
    for part in parts[1:]:
        flags, rss = (
            re.search(r"^VmFlags:.* dc\b", part, re.MULTILINE),
            re.search(r"^Rss:\s+(\d+) kB", part, re.MULTILINE),
        )
        anonymous = len(part.splitlines()[0].split()) < 6  # not a device or a file
        held += int(rss[1]) * 1024 if flags and rss and anonymous else 0
    return held


def left() -> int:
    return number(Path("/proc/meminfo"), r"^MemAvailable:\s+(\d+) kB")


def follow(process: subprocess.Popen[bytes], seen: Seen) -> None:
    begun, turn = time.monotonic(), 0
    while process.poll() is None:
        family = descendants(process.pid)
        pss = sum(number(Path(f"/proc/{pid}/smaps_rollup"), r"^Pss:\s+(\d+) kB") for pid in family)
        seen.pss, seen.processes = max(seen.pss, pss), max(seen.processes, len(family))
        seen.least_left = min(seen.least_left, left())
        seen.series.append((time.monotonic() - begun, pss / GIB))
        if turn % 5 == 0:  # a long file
            seen.staging = max(seen.staging, sum(staging_of(pid) for pid in family))
        turn += 1
        time.sleep(1)


def run(folder: Path, name: str, overrides: list[str]) -> tuple[int, Seen, list[dict[str, Any]], float, int]:
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder))
    command = [sys.executable, "-m", "fullshard", "train", str(recipe), f"name={name}", "log.every_steps=1", *overrides]
    command += ["--resume", "never"]
    print("$", " ".join(command[2:]), flush=True)
    seen, begun = Seen(left_before=left()), time.time()
    with (folder / f"{name}.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        thread = threading.Thread(target=follow, args=(process, seen))
        thread.start()
        code = process.wait()
        thread.join()
    said = (folder / f"{name}.txt").read_text()
    kept = [line for line in said.splitlines() if re.search(r"Saved|waited|ackground|killed|warning|rror", line)]
    print("\n".join(kept[-12:] if code == 0 else said.splitlines()[-25:]), flush=True)
    place, records = folder / "runs" / name, []
    if (place / "metrics.jsonl").exists():
        records = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    manifests = [json.loads(path.read_text()) for path in place.glob("checkpoint-*/manifest.json")]
    state = max((sum(f["size_bytes"] for f in manifest["files"].values()) for manifest in manifests), default=0)
    first = first_update(place, begun)
    shutil.rmtree(place, ignore_errors=True)
    return code, seen, records, first, state


def first_update(place: Path, begun: float) -> float:
    """Seconds from the command to the line of step 1, by the times in log.txt."""
    if (log := place / "log.txt").exists():
        for line in log.read_text().splitlines():
            if re.search(r"\bstep +1/", line):
                return time.mktime(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S")) - begun
    return float("nan")


def row(name: str, code: int, seen: Seen, records: list[dict[str, Any]], first: float, state: int) -> str:
    ends = {r["step"]: r["seconds"] for r in records if r["kind"] == "train"}
    steps = {step: ends[step] - ends[step - 1] for step in ends if step - 1 in ends and step > 5}
    median = statistics.median(steps.values()) if steps else float("nan")
    saves = [r for r in records if r.get("event") == "saved"]
    blocked = f"{max(r['stall_seconds'] for r in saves):.3f}" if saves else "-"
    after = [sum(steps[s] - median for s in range(r["step"], r["step"] + 8) if s in steps) for r in saves]
    before = [
        max((steps[s] - median for s in range(r["step"] - 12, r["step"]) if s in steps), default=0) for r in saves
    ]
    told = max((r.get("host_memory_gib", 0.0) for r in records), default=0.0)
    share = f"{seen.staging / GIB:.2f} / {state / GIB:.2f}" + (f" ({seen.staging / state - 1:+.1%})" if state else "")
    cells = [
        *(name, "ok" if code == 0 else f"exit {code}", seen.processes, f"{seen.pss / GIB:.1f}", f"{told:.1f}"),
        *(f"{(seen.left_before - seen.least_left) / GIB:.1f}", f"{first:.0f}", share, f"{median:.3f}", blocked),
        *(f"{max(after):.2f}" if after else "-", f"{max(before):.2f}" if before else "-"),
    ]
    return f"| {' | '.join(map(str, cells))} |"


HEADS = ["run", "end", "processes", "peak PSS GiB", "as logged", "MemAvailable fell by GiB", "first update s"]
HEADS += ["staging / checkpoint GiB", "median step s", "host blocked s", "8 steps after +s", "worst step before +s"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=["8B", "1.7B-0", "1.7B-2"])
    parser.add_argument("--folder", type=Path, default=None, help="where data, caches and checkpoints go")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU: whether this script works")
    parser.add_argument("--series", action="store_true", help="print the sum of PSS of every second")
    parser.add_argument("--set", nargs="*", default=[], help="further key=value settings of every run")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        write_text(folder)
        total = number(Path("/proc/meminfo"), r"^MemTotal:\s+(\d+) kB")
        print(f"host memory {total / GIB:.0f} GiB, disk {shutil.disk_usage(folder).free / 1e9:.0f} GB free", flush=True)
        for name in options.runs:
            overrides = [word.format(save=24) for word in RUNS[name]]
            if options.tiny:
                overrides = [word.replace("steps=30", "steps=16").replace("steps=24", "steps=10") for word in overrides]
            settings = dict(word.split("=", 1) for word in [*overrides, *(TINY if options.tiny else []), *options.set])
            found = run(folder, name, [f"{key}={value}" for key, value in settings.items()])
            rows.append(row(name, *found))
            if options.series:
                print(" ".join(f"{at:.0f}:{held:.1f}" for at, held in found[1].series), file=sys.stderr, flush=True)
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
