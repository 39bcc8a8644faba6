"""Contrastive training of the Qwen3-0.6B shape on one GPU: pairs per second and memory, beside sentence-transformers.

    python benchmarks/embedding.py                      every table
    python benchmarks/embedding.py --only speed         2,048 pairs of 128 tokens: chunks, and their cached loss
    python benchmarks/embedding.py --only cache memory padding

Pairs are neighbouring pieces of Python's language reference, from disk through the ordinary loader; fp32 parameters and
Adam states, bf16 compute, per-block compile. sentence-transformers gets the same shape under autocast, with features
that are tokenised and padded beforehand. `--tiny` runs everything in seconds on a CPU, for the script's own sake.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

WARMUP = 3
TABLES = ("speed", "cache", "memory", "padding")


def write_pairs(folder: Path, count: int, *, words: tuple[int, int]) -> Path:
    """Neighbouring pieces of the language reference; so many words each."""
    from pydoc_data.topics import topics

    text = " ".join(topics[key] for key in sorted(topics)).split()
    draw, path = random.Random(0), folder / f"pairs-{count}-{words[1]}.jsonl"
    with path.open("w") as file:
        for _ in range(count):
            first, second = draw.randint(*words), draw.randint(*words)
            at = draw.randrange(len(text) - first - second)
            record = {"query": " ".join(text[at : at + first]), "positive": " ".join(text[at + first :][:second])}
            file.write(json.dumps(record) + "\n")
    return path


class Bench:
    """Where runs go, and their shape."""

    def __init__(self, folder: Path, *, tiny: bool) -> None:
        self.folder, self.tiny, self.runs = folder, tiny, 0
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def run(self, pairs: Path, *, batch: int, cache: Any, steps: int, **settings: Any) -> dict[str, float]:
        """Trains with fullshard; pairs per second (median step), peak GiB, share of padding."""
        from fullshard.recipes.read import read
        from fullshard.run import execute

        self.runs += 1
        recipe = {
            "name": f"run-{self.runs}",
            "output": str(self.folder / "runs"),
            "model": {
                "kind": "sentence_transformer",
                "architecture": "qwen3",
                "size": "tiny" if self.tiny else "0.6B",
                "overrides": {"vocab_size": 500 if self.tiny else 151936},
                "tokenizer": {"train": {"vocab_size": 500 if self.tiny else 32000}},
            },
            "objective": {"kind": "contrastive", "loss": {"kind": "infonce"}, "cache": cache},
            "data": {"train": str(pairs), "sequence_length": 128, "holdout": 0, "cache": str(self.folder / "cache")},
            "batch": {"per_device": batch},
            "duration": {"steps": steps},
            "optimizer": {"lr": 1e-5},
            "precision": "bf16",
            "log": {"every_steps": 1, "sinks": []},
            "evaluate": {"parts": []},
            "checkpoint": {"every_epochs": None, "at_end": False, "best": None},
        }
        for key, value in settings.items():
            recipe[key] = {**recipe.get(key, {}), **value}
        self._forget()
        with (self.folder / "console.txt").open("a") as console, contextlib.redirect_stdout(console):
            execute(read(recipe), resume="never")
        lines = (self.folder / "runs" / recipe["name"] / "metrics.jsonl").read_text().splitlines()
        records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
        seconds = [b["seconds"] - a["seconds"] for a, b in zip(records, records[1:], strict=False)]
        return {
            "rate": batch / statistics.median(seconds[min(WARMUP, len(seconds)) - 1 :]),
            "memory": max(record["memory_gib"] for record in records),
            "padding": records[-1]["padding"],
        }

    def theirs(self, *, batch: int, chunk: int, length: int, steps: int) -> dict[str, float]:
        """sentence-transformers' cached loss on the same shape."""
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import AutoModel, PreTrainedTokenizerFast

        from fullshard.hf.architecture.sizes import make_config

        self._forget()
        config = make_config("qwen3", "tiny" if self.tiny else "0.6B", {} if not self.tiny else {"vocab_size": 500})
        folder = self.folder / "theirs"
        if not folder.is_dir():
            torch.manual_seed(0)
            AutoModel.from_config(config).save_pretrained(folder)
            words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))  # never asked: ids are given
            PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]").save_pretrained(folder)
        model = SentenceTransformer(str(folder), device=self.device).train()
        loss_of = CachedMultipleNegativesRankingLoss(model, mini_batch_size=chunk)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        ids = torch.randint(5, 400, (2, batch, length), device=self.device)
        features = [{"input_ids": each, "attention_mask": torch.ones_like(each)} for each in ids]
        seconds = []
        for _ in range(steps):
            begun = time.perf_counter()
            # Around the backward pass as well: it runs the second forward passes.
            with torch.autocast(self.device, torch.bfloat16):
                loss = loss_of([dict(each) for each in features], None)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if self.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
            print(f"sentence-transformers: step of {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else 0.0
        return {"rate": batch / statistics.median(seconds[1:]), "memory": memory, "padding": 0.0}

    def _forget(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def show(label: str, found: dict[str, float] | Exception, base: float | None = None) -> None:
    if isinstance(found, Exception):
        print(f"| {label} | {type(found).__name__} {str(found).strip().splitlines()[:1]} | | | |", flush=True)
        return
    ratio = f"{found['rate'] / base:.2f}" if base else ""
    print(f"| {label} | {found['rate']:,.0f} | {ratio} | {found['memory']:.1f} | {found['padding']:.1%} |", flush=True)


def apart(run: Any, *args: Any, **settings: Any) -> Any:
    """In a process of its own: an error of a kernel would end every run after it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(run, *args, **settings).result()


def attempt(run: Any, *args: Any, **settings: Any) -> Any:
    try:
        return run(*args, **settings)
    except (torch.cuda.OutOfMemoryError, RuntimeError) as error:
        # Its frames hold the tensors of the run that failed.
        return error.with_traceback(None)


def speed(bench: Bench, size: int, chunks: list[int], pairs: Path, *, base: float | None) -> None:
    for chunk in chunks:
        label = f"fullshard, {size:,} pairs, chunk {chunk}"
        show(label, attempt(bench.run, pairs, batch=size, cache=chunk, steps=8), base)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=list(TABLES), choices=TABLES)
    parser.add_argument("--chunks", nargs="*", type=int, default=[128, 256, 512])
    parser.add_argument("--pairs", nargs="*", type=int, default=[4096, 8192, 16384], help="of the table memory")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    scale = 64 if options.tiny else 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bench = Bench(folder, tiny=options.tiny)
        full = write_pairs(folder, 65536 // scale, words=(128, 160))  # cut at 128 tokens
        print("| run | pairs/s | times theirs | peak GiB | padding |\n|---|---|---|---|---|", flush=True)
        if "speed" in options.only:
            size = 2048 // scale
            theirs = attempt(apart, bench.theirs, batch=size, chunk=128, length=128, steps=4)
            show(f"sentence-transformers, cached loss, {size:,} pairs, chunk 128", theirs)
            base = None if isinstance(theirs, Exception) else theirs["rate"]
            speed(bench, size, options.chunks, full, base=base)
        if "cache" in options.only:
            size = 256 // min(scale, 16)
            plain = attempt(bench.run, full, batch=size, cache=None, steps=12)
            show(f"fullshard, {size:,} pairs, no cache", plain)
            base = None if isinstance(plain, Exception) else plain["rate"]
            for chunk in (size, size // 2):
                found = attempt(bench.run, full, batch=size, cache=chunk, steps=12)
                show(f"fullshard, {size:,} pairs, chunk {chunk} (of {2 * size} texts)", found, base)
        if "padding" in options.only:
            mixed = write_pairs(folder, 16384 // scale, words=(4, 110))
            for label, settings in (("packed", {}), ("padded, by length", {"data": {"pack": False}})):
                found = attempt(bench.run, mixed, batch=2048 // scale, cache=256, steps=6, **settings)
                show(f"fullshard, {2048 // scale:,} pairs of 5 to 128 tokens, chunk 256, {label}", found)
        if "memory" in options.only:
            for size in options.pairs:
                found = attempt(bench.run, full, batch=size // scale, cache=512, steps=2)
                show(f"fullshard, {size // scale:,} pairs, chunk 512", found)


if __name__ == "__main__":
    main()
