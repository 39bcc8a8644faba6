"""DiT-XL/2 on 4 x 32 x 32 latents from disk, batch 256, on one GPU: images per second and memory, beside a plain loop.

    python benchmarks/diffusion.py                    every run
    python benchmarks/diffusion.py --only fullshard
    python benchmarks/diffusion.py --only fullshard --profile    and where the time of a step goes

Rectified flow, AdamW, fp32 parameters and states, bf16 compute, gradients clipped. The plain loop is what one writes
with diffusers: autocast, latents that already lie on the GPU, no EMA; once as it is and once with each block compiled.
fullshard reads `.npy` files through the ordinary loader. `--tiny` runs everything in seconds on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

WARMUP, STEPS = 10, 30
RUNS = ("plain", "compiled", "fullshard", "ema", "recompute")


class Bench:
    """The shape of every run."""

    def __init__(self, folder: Path, *, tiny: bool) -> None:
        self.folder, self.tiny = folder, tiny
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.batch, self.size = (8, 8) if tiny else (256, 32)
        self.shape = {"in_channels": 4, "out_channels": 4, "sample_size": self.size}

    def write_latents(self) -> Path:
        """A file for each latent, and a table that names them."""
        draw, folder = np.random.default_rng(0), self.folder / "latents"
        folder.mkdir()
        lines = []
        for number in range(self.batch * 8):
            latent = draw.standard_normal((4, self.size, self.size), dtype=np.float32)
            np.save(folder / f"{number}.npy", latent)
            lines.append(
                json.dumps(
                    {"latent_vector_path": f"{number}.npy", "label": int(draw.integers(10 if self.tiny else 1000))}
                )
            )
        (folder / "latents.jsonl").write_text("\n".join(lines))
        return folder / "latents.jsonl"

    def model(self) -> Any:
        from diffusers import DiTTransformer2DModel

        from fullshard.families.diffusion.denoiser.architectures import named_size

        size = named_size("DiTTransformer2DModel", "tiny" if self.tiny else "XL/2")
        with torch.device(self.device):
            return DiTTransformer2DModel(**size, **self.shape, num_embeds_ada_norm=10 if self.tiny else 1000)

    def flops_per_image(self) -> float:
        """Of a forward and a backward pass, three times the products of a forward pass, as torch counts them."""
        from torch.utils.flop_counter import FlopCounterMode

        with torch.device("meta"):
            model, latents = self.model().to("meta"), torch.empty(1, 4, self.size, self.size)
            times, labels = torch.empty(1), torch.zeros(1, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(latents, times, labels)
        return 3.0 * counter.get_total_flops()

    def plain(self, *, compiled: bool) -> dict[str, float]:
        """Rectified flow with diffusers' model, autocast and fused AdamW."""
        torch.manual_seed(0)
        model = self.model().train()
        if compiled:
            for block in model.transformer_blocks:
                block.compile()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=self.device == "cuda")
        latents = torch.randn(self.batch, 4, self.size, self.size, device=self.device)
        labels = torch.randint(10, (self.batch,), device=self.device)
        seconds = []
        for _ in range(WARMUP + STEPS):
            begun = time.perf_counter()
            noise, times = torch.randn_like(latents), torch.rand(self.batch, device=self.device)
            wide = times[:, None, None, None]
            with torch.autocast(self.device, torch.bfloat16):
                found = model((1 - wide) * latents + wide * noise, times * 1000, labels).sample
                loss = torch.nn.functional.mse_loss(found.float(), noise - latents)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if self.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else 0.0
        return {"rate": self.batch / statistics.median(seconds[WARMUP:]), "memory": memory}

    def fullshard(self, table: Path, name: str, *, profile: bool = False, **sections: Any) -> dict[str, Any]:
        """Through `fullshard train`'s own path; the median of the logged windows of ten steps."""
        from fullshard.recipes.read import read
        from fullshard.run import execute

        kernels = profile_a_step() if profile else []
        recipe = {
            "name": name,
            "output": str(self.folder / "runs"),
            "model": {
                "kind": "diffusers",
                "architecture": "dit",
                "size": "tiny" if self.tiny else "XL/2",
                "classes": 10 if self.tiny else 1000,
                "overrides": self.shape,
            },
            "objective": {"kind": "flow_matching"},
            "data": {
                "train": str(table),
                "encode": {"kind": "image", "root": str(table.parent)},
                "holdout": 0,
                "cache": str(self.folder / "cache"),
                "pack": False,
            },
            "batch": {"per_device": self.batch},
            "duration": {"steps": WARMUP + STEPS + 1},
            "optimizer": {"lr": 1e-4},
            "precision": "bf16",
            "log": {"every_steps": 10, "sinks": []},
            "evaluate": {"parts": []},
            "checkpoint": {"every_epochs": None, "at_end": False, "best": None},
            **sections,
        }
        with (self.folder / "console.txt").open("a") as console, contextlib.redirect_stdout(console):
            execute(read(recipe), resume="never")
        lines = (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
        pairs = [(a, b) for a, b in zip(records, records[1:], strict=False) if a["step"] >= WARMUP]
        rates = [(b["samples"] - a["samples"]) / (b["seconds"] - a["seconds"]) for a, b in pairs]
        memory = max(record["memory_gib"] for record in records)
        return {"rate": statistics.median(rates), "memory": memory, "kernels": kernels}


def profile_a_step() -> list[str]:
    """Fills the list it returns with a step's kernels, the longest first, once the last step has run."""
    import fullshard.loop

    lines, number, train_step = [], itertools.count(1), fullshard.loop.train_step

    def step(*args: Any, **settings: Any) -> Any:
        if next(number) != WARMUP + STEPS + 1:
            return train_step(*args, **settings)
        with torch.profiler.profile() as profiler:
            result = train_step(*args, **settings)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        found = [event for event in profiler.key_averages() if event.self_device_time_total]
        for event in sorted(found, key=lambda event: -event.self_device_time_total)[:40]:
            total = event.self_device_time_total / 1e3
            lines.append(f"{total:8.2f} ms {event.count:5} x {1e3 * total / event.count:8.1f} us  {event.key[:110]}")
        return result

    fullshard.loop.train_step = step
    return lines


def apart(run: Any, *args: Any, **settings: Any) -> Any:
    """In a process of its own, so that no run sees what another left in memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(run, *args, **settings).result()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=RUNS)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(Path(temporary), tiny=options.tiny)
        flops, table = bench.flops_per_image(), bench.write_latents()
        print(f"{flops / 1e9:.1f} GFLOP per image")
        print("| run | images/s | times plain | of 989 TFLOP/s | peak GiB |\n|---|---|---|---|---|", flush=True)
        runs: dict[str, tuple[str, Any, dict[str, Any]]] = {
            "plain": ("diffusers, autocast", bench.plain, {"compiled": False}),
            "compiled": ("diffusers, autocast, blocks compiled", bench.plain, {"compiled": True}),
            "fullshard": ("fullshard", bench.fullshard, {"table": table, "name": "plain"}),
            "ema": ("fullshard, with EMA", bench.fullshard, {"table": table, "name": "ema", "ema": True}),
            "recompute": (
                "fullshard, recomputing (selective)",
                bench.fullshard,
                {"table": table, "name": "recompute", "sharding": {"activation_checkpointing": "selective"}},
            ),
        }
        base = None
        for key in options.only:
            label, run, settings = runs[key]
            if options.profile and run == bench.fullshard:
                settings = {**settings, "profile": True}
            try:
                found = apart(run, **settings)
            except Exception as error:
                print(f"| {label} | {type(error).__name__}: {str(error)[:200]} | | | |", flush=True)
                continue
            base = base or found["rate"]
            rate, share = found["rate"], found["rate"] * flops / 989e12
            print(f"| {label} | {rate:,.0f} | {rate / base:.2f} | {share:.1%} | {found['memory']:.1f} |", flush=True)
            for line in found.get("kernels", ()):
                print(line)
            gc.collect()


if __name__ == "__main__":
    sys.exit(main())
