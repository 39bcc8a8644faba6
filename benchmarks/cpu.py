"""Quickstart's shape on the CPU: `fullshard train quickstart` and the Hugging Face Trainer, in turns in one call.

    python benchmarks/cpu.py                    one rank, then two ranks; three turns each
    python benchmarks/cpu.py --plain            with FULLSHARD_FAST=0
    python benchmarks/cpu.py --ranks 1 --turns 5
    python benchmarks/cpu.py --tiny             a few steps, to see that it works

Both train the same model from its config on the same rows of tokens, with the same batch, optimizer, clipping and
schedule, each in processes of its own; the Trainer runs under torchrun if there are several. Caches are warm: the
product has its tokenizer and tokens, the Trainer a tokenizer and a dataset on disk. This process reads the lines that
they print, and takes the time and the CPU time of all their processes at each: rates are between two lines of steps.
Other work on the machine slows down whoever has the turn, so compare ratios over several turns, and CPU time.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

ROWS, LENGTH, EVERY, WARMUP = 4, 128, 25, 50
"""Rows of a step over all ranks, their tokens, how often a step is printed, and the steps left out of rates."""
STEP = re.compile(r"^step +(\d+)/")


@dataclass
class Run:
    """What was seen of one process and its children."""

    first_line: float = 0.0
    lines: list[str] = field(default_factory=list)
    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Seconds since the start and CPU seconds, at each step that was printed."""

    @property
    def first_step(self) -> float:
        return self.steps[1][0]

    def steady(self) -> tuple[float, float]:
        """Tokens per second, and CPU milliseconds per step."""
        numbers = sorted(self.steps)
        begin = max(number for number in numbers if number <= min(WARMUP, max(numbers[-1] // 2, 1)))
        (since, used), (until, total) = self.steps[begin], self.steps[numbers[-1]]
        steps = numbers[-1] - begin
        return steps * ROWS * LENGTH / (until - since), 1000 * (total - used) / steps


def watched(command: list[str], environ: dict[str, str]) -> Run:
    began, run = time.monotonic(), Run()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | environ
    ) as process:
        whole = psutil.Process(process.pid)
        assert process.stdout is not None
        for line in process.stdout:
            run.lines.append(line)
            now = time.monotonic() - began
            run.first_line = run.first_line or now
            if found := STEP.match(line):
                run.steps[int(found[1])] = now, _cpu_seconds(whole)
    if process.returncode or not run.steps:
        raise SystemExit("".join([*run.lines[-40:], f"{' '.join(command)} ended with {process.returncode}"]))
    return run


def _cpu_seconds(process: Any) -> float:
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def product(folder: Path, ranks: int, options: argparse.Namespace) -> Run:
    command = [sys.executable, "-m", "fullshard", "train", "quickstart", "--output", str(folder / "runs")]
    command += [
        "--resume",
        "never",
        f"topology.devices={ranks}",
        f"duration.steps={options.steps}",
        "duration.epochs=null",
    ]
    command += [f"log.every_steps={options.every}", "evaluate.parts=[]", "checkpoint.at_end=false", *options.set]
    run = watched(command, {"FULLSHARD_CACHE": str(folder / "cache"), "FULLSHARD_FAST": str(int(not options.plain))})
    said = " ".join(" ".join(run.lines).split())  # a long row of the header is wrapped
    if ("within a step" in said or "once in a step" in said) == options.plain:
        raise SystemExit("".join([*run.lines[:20], "The header disagrees with --plain."]))
    return run


def peer(folder: Path, ranks: int, options: argparse.Namespace) -> Run:
    start = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run"]
    start += [] if ranks == 1 else ["--nproc-per-node", str(ranks), "--master-port", "29517"]
    words = [__file__, "--peer", str(folder), "--steps", str(options.steps), "--every", str(options.every)]
    return watched([*start, *words], {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"})


def prepare(folder: Path) -> None:
    """Fills the product's cache, and writes the same model, tokenizer and rows for the Trainer."""
    os.environ["FULLSHARD_CACHE"] = str(folder / "cache")
    from datasets import Dataset, disable_progress_bars

    from fullshard.log.console import Console
    from fullshard.recipes.read import read
    from fullshard.setup.run_inputs import prepare_inputs

    disable_progress_bars()
    inputs = prepare_inputs(read("quickstart").recipe, world_size=1, console=Console(silent=True))
    module: Any = inputs.module
    rows = [list(map(int, inputs.data.train[at]["input_ids"])) for at in range(len(inputs.data.train))]
    rows = [row for row in rows if len(row) == LENGTH]
    Dataset.from_dict({"input_ids": rows, "labels": rows}).save_to_disk(str(folder / "rows"))
    module.config.save_pretrained(folder / "model")
    inputs.processor.save_pretrained(folder / "model")


def train_peer(folder: Path, steps: int, every: int) -> None:
    """A script of the kind that people write, in this process."""
    from datasets import load_from_disk
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        default_data_collator,
    )

    class Lines(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if args.process_index == 0 and (state.global_step == 1 or state.global_step % every == 0):
                print(f"step {state.global_step}/{steps}", flush=True)

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    settings = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=ROWS // 2 // ranks,
        max_steps=steps,
        learning_rate=3e-3,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=every,
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        ddp_backend="gloo" if ranks > 1 else None,
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model")),
        args=settings,
        train_dataset=load_from_disk(str(folder / "rows")),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        data_collator=default_data_collator,
        callbacks=[Lines()],
    )
    trainer.train()


def compare(folder: Path, ranks: int, options: argparse.Namespace) -> str:
    """Product and peer in turns; returns a line that sums them up."""
    found: dict[str, list[Run]] = {"fullshard": [], "HF Trainer": []}
    for turn in range(options.turns):
        for name, job in (("fullshard", product), ("HF Trainer", peer)):
            run = job(folder, ranks, options)
            found[name].append(run)
            speed, used = run.steady()
            first = f"{run.first_line:.2f} | {run.first_step:.2f} | {run.steps[1][1]:.2f}"
            print(f"| {ranks} | {turn + 1} | {name} | {speed:,.0f} | {used:.1f} | {first} |", flush=True)
    pairs = list(zip(*found.values(), strict=True))
    ratios = {
        "tokens/s": [ours.steady()[0] / theirs.steady()[0] for ours, theirs in pairs],
        "CPU time per step": [ours.steady()[1] / max(theirs.steady()[1], 1e-9) for ours, theirs in pairs],
        "first step": [ours.first_step / theirs.first_step for ours, theirs in pairs],
        "CPU time to it": [ours.steps[1][1] / theirs.steps[1][1] for ours, theirs in pairs],
    }
    words = [f"{name} {statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for name, r in ratios.items()]
    return f"{ranks} rank(s), fullshard / HF Trainer, median (range) of {len(pairs)} turns: {'; '.join(words)}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--every", type=int, default=EVERY, help="how often a step is printed")
    parser.add_argument("--set", nargs="*", default=[], help="further key=value settings of the product")
    parser.add_argument("--plain", action="store_true", help="set FULLSHARD_FAST=0 for the product")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--peer", type=Path, help="be the Trainer, with the files in this folder")
    options = parser.parse_args()
    if options.peer:
        train_peer(options.peer, options.steps, options.every)
        return
    if options.tiny:
        options.turns, options.steps, options.every = 1, 4, 2
    with tempfile.TemporaryDirectory() as temporary:
        prepare(Path(temporary))
        print(
            "| ranks | turn | job | tokens/s | CPU ms per step | first line s | first step s | CPU s until then |\n|"
            + "---|" * 8
        )
        lines = [compare(Path(temporary), ranks, options) for ranks in options.ranks]
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
