"""The table of speeds, one row a call: fullshard beside its peer on the same device, in less than 4 minutes.

    python benchmarks/rows.py pretrain     1.7B, rows of 4,096, batch 8, packed; torchtitan's model
    python benchmarks/rows.py float8       the same in bf16 and in float8; torchtitan's model in float8
    python benchmarks/rows.py float8 --quality   300 steps each on text that is not repeated: held-out losses
    python benchmarks/rows.py lora8b       8B, adapters of rank 16 on all linear layers, bf16 and float8 base; peft
    python benchmarks/rows.py full8b       8B, all weights on one GPU; Transformers
    python benchmarks/rows.py sft          short conversations, packed, beside the packed text of `pretrain`
    python benchmarks/rows.py embedding    0.6B, 2,048 pairs of 128 tokens; sentence-transformers
    python benchmarks/rows.py start        seconds to the first line and the first update, cold and warm; HF Trainer
    python benchmarks/rows.py small        a model that the host limits (89M); HF Trainer

`--only` takes some of the jobs, `--set key=value ...` changes every run of fullshard, such as
`--set model.attention=flash_attention_4`. `--tiny` runs everything on a CPU in seconds, for the script's own sake.
Peers read no data and see random tokens; torchtitan 0.2.2 needs tyro and torchdata beside it.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Benchmarks import each other from their own folder.
sys.path.insert(0, str(Path(__file__).parent))
import peers  # noqa: E402
from llm import RECIPE, WARMUP, run, write_text  # noqa: E402
from side_by_side import result  # noqa: E402

VERSIONS = ("torch", "transformers", "peft", "torchao", "torchtitan", "sentence-transformers", "flash-attn-4")
SMALL = {"hidden_size": 640, "intermediate_size": 1760, "num_hidden_layers": 10, "num_attention_heads": 10}
SMALL |= {"num_key_value_heads": 10, "vocab_size": 32000, "max_position_embeddings": 1024}
"""A Llama of 89 million parameters."""
SMALL_TINY = {"num_hidden_layers": 2, "vocab_size": 500}
QUALITY_STEPS = 300
Numbers = dict[str, float]


@dataclass(frozen=True)
class Bench:
    """Where the jobs of a row run, and how large they are."""

    folder: Path
    tiny: bool
    steps: int | None
    settings: tuple[str, ...]

    def product(self, *overrides: str, batch: int, steps: int = 41) -> Numbers:
        """Trains with `fullshard train` on text from disk; the median after the warm-up."""
        words = self.words(*overrides, batch=batch, steps=steps)
        return numbers(run(self.folder, "product", *words), after=1 if self.tiny else WARMUP)

    def words(self, *overrides: str, batch: int, steps: int) -> list[str]:
        """The settings of a run, each once: the user's win, then those of the row."""
        steps = self.steps or (4 if self.tiny else steps)
        small = ["model.size=tiny", "model.overrides.vocab_size=500", "model.tokenizer.train.vocab_size=400"]
        small += ["data.sequence_length=64", "topology.device=cpu", "topology.devices=1", "log.every_steps=1"]
        size = [f"batch.per_device={2 if self.tiny else batch}", f"duration.steps={steps}"]
        found: dict[str, str] = {}
        for word in (*size, *(small if self.tiny else ()), *overrides, *self.settings):
            key, _, value = word.partition("=")
            found = {k: v for k, v in found.items() if k != key and not k.startswith(f"{key}.")}
            found[key] = value
        return [f"{key}={value}" for key, value in found.items()]

    def write_text(self) -> None:
        write_text(self.folder, copies=0 if self.tiny else 8)

    @property
    def float8(self) -> str:
        return "precision=float8-emulated" if self.tiny else "precision=float8"

    def peer(
        self, kind: str, *, batch: int = 0, length: int = 4096, steps: int = 24, **settings: Any
    ) -> Numbers | None:
        """One of `peers`, in its own process."""
        asked = {"tiny": self.tiny, "batch": 2 if self.tiny else batch, "length": 64 if self.tiny else length}
        asked |= {"steps": self.steps or (3 if self.tiny else steps), **settings}
        words = [sys.executable, __file__, "--one", kind, "--folder", str(self.folder), "--asked", json.dumps(asked)]
        print(f"$ {kind} {asked}", flush=True)
        return result(words, os.environ)


def numbers(records: list[dict[str, Any]], *, after: int) -> Numbers:
    steady = [r for r in records if r["step"] > after and "tokens_per_second" in r]
    return {
        "rate": statistics.median(r["tokens_per_second"] for r in steady),
        "mfu": statistics.median(r.get("mfu", 0.0) for r in steady),
        "memory": max(r["memory_gib"] for r in records),
    }


Jobs = dict[str, Callable[[], "Numbers | None"]]


def pretrain(bench: Bench) -> Jobs:
    bench.write_text()
    return {
        "fullshard": lambda: bench.product(batch=8),
        "torchtitan's model": lambda: bench.peer("titan", batch=8, float8=False),
    }


def float8(bench: Bench) -> Jobs:
    bench.write_text()
    return {
        "fullshard, bf16": lambda: bench.product(batch=8, steps=31),
        "fullshard, float8": lambda: bench.product(bench.float8, batch=8, steps=31),
        "torchtitan's model, float8": lambda: bench.peer("titan", batch=8, float8=True),
    }


def lora8b(bench: Bench) -> Jobs:
    bench.write_text()
    base = write_base(bench)
    adapters = [
        f"model.path={base}",
        "model.architecture=null",
        "model.size=null",
        "model.tokenizer=null",
    ]
    adapters += ["model.lora={r: 16, targets: all-linear}", "sharding.strategy=full"]
    train = functools.partial(bench.product, batch=4, steps=31)
    return {
        "fullshard, bf16 base": lambda: train(*adapters),
        "fullshard, float8 base": lambda: train(*adapters, bench.float8),
        "Transformers and peft, compiled": lambda: bench.peer(
            "transformers", batch=4, size="8B", lora=16, recompute=False, steps=12
        ),
    }


def full8b(bench: Bench) -> Jobs:
    bench.write_text()
    pure = ["precision=bf16-pure", "sharding.activation_checkpointing=selective"]
    eight = ["optimizer.kind=adamw_8bit", "sharding.activation_checkpointing=full"]
    train = functools.partial(bench.product, *([] if bench.tiny else ["model.size=8B"]), steps=21)
    jobs: Jobs = {
        "fullshard, bf16-pure, batch 2, selective recompute": lambda: train(*pure, batch=2),
        "fullshard, 8-bit AdamW, batch 2, full recompute": lambda: train(*eight, batch=2),
        "Transformers in bf16, compiled, full recompute": lambda: bench.peer(
            "transformers", batch=4, size="8B", lora=None, recompute=True, steps=10
        ),
    }
    if bench.tiny:  # its update takes a minute to compile
        del jobs["fullshard, 8-bit AdamW, batch 2, full recompute"]
    return jobs


def sft(bench: Bench) -> Jobs:
    bench.write_text()
    talks = f"data.train={write_conversations(bench.folder, 300 if bench.tiny else 24_000)}"
    return {
        "fullshard, conversations": lambda: bench.product(talks, batch=8, steps=31),
        "fullshard, text": lambda: bench.product(batch=8, steps=31),
    }


def embedding(bench: Bench) -> Jobs:
    from embedding import Bench as Pairs
    from embedding import apart, write_pairs

    scale = 64 if bench.tiny else 1
    path = write_pairs(bench.folder, 24576 // scale, words=(128, 160))
    pairs, batch = Pairs(bench.folder, tiny=bench.tiny), 2048 // scale
    keys = [setting.partition("=")[::2] for setting in bench.settings]
    more = {key.partition(".")[0]: {key.partition(".")[2]: value} for key, value in keys}
    return {
        "fullshard, chunk 512": lambda: pairs.run(
            path, batch=batch, cache=512 // scale, steps=bench.steps or 8, **more
        ),
        "sentence-transformers": lambda: apart(pairs.theirs, batch=batch, chunk=128, length=128, steps=4),
    }


def start(bench: Bench) -> Jobs:
    bench.write_text()
    small = SMALL | (SMALL_TINY if bench.tiny else {})
    return {
        "fullshard, cold": lambda: first_update(bench, "cold"),
        "fullshard, warm": lambda: first_update(bench, "warm"),
        "HF Trainer, 89M, not compiled": lambda: bench.peer(
            "hf_trainer", batch=8, length=1024, steps=3, architecture="llama", changes=small
        ),
    }


def small(bench: Bench) -> Jobs:
    bench.write_text()
    shape = SMALL | (SMALL_TINY if bench.tiny else {})
    words = ["model.architecture=llama", "model.size=tiny", f"model.overrides={json.dumps(shape)}"]
    words += [] if bench.tiny else ["data.sequence_length=1024"]
    return {
        "fullshard": lambda: bench.product(*words, batch=16, steps=101),
        "HF Trainer": lambda: bench.peer(
            "hf_trainer", batch=16, length=1024, steps=60, architecture="llama", changes=shape
        ),
    }


ROWS: dict[str, Callable[[Bench], Jobs]] = {
    row.__name__: row for row in (pretrain, float8, lora8b, full8b, sft, embedding, start, small)
}


def write_base(bench: Bench) -> Path:
    """A model folder in bf16 with random weights, as a base to adapt."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = bench.folder / "base"
    changes = {"vocab_size": 500} if bench.tiny else {}
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(peers.device()):
        model = AutoModelForCausalLM.from_config(peers.config_of("8B", tiny=bench.tiny, **changes))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    write_tokenizer(bench, folder)
    print(f"wrote a base of {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return folder


def write_tokenizer(bench: Bench, folder: Path) -> None:
    from pydoc_data.topics import topics

    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    made = ByteLevelBPETokenizer()
    size = 400 if bench.tiny else 32000
    made.train_from_iterator(topics.values(), vocab_size=size, special_tokens=["<end>"], show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(
        folder
    )


def write_conversations(folder: Path, count: int) -> Path:
    """Questions and answers of about 300 tokens: pieces of the language reference."""
    from pydoc_data.topics import topics

    words = " ".join(topics[key] for key in sorted(topics)).split()
    draw, path = random.Random(0), folder / "conversations.jsonl"
    with path.open("w") as file:
        for _ in range(count):
            parts, at = [draw.randint(5, 60), int(draw.expovariate(1 / 130)) + 10], draw.randrange(len(words) - 2000)
            texts = [" ".join(words[at : at + parts[0]]), " ".join(words[at + parts[0] : at + sum(parts)])]
            roles = zip(("user", "assistant"), texts, strict=True)
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in roles]}) + "\n")
    return path


def first_update(bench: Bench, name: str) -> Numbers:
    """Seconds from the start of the command to its first line, its header and its first update."""
    recipe, caches = bench.folder / "recipe.yaml", bench.folder / "caches"
    recipe.write_text(RECIPE.format(folder=bench.folder))
    words = [sys.executable, "-m", "fullshard", "train", str(recipe), f"name={name}", "--resume", "never"]
    words += bench.words("duration.steps=2", "log.every_steps=1", batch=8, steps=2)
    print("$", " ".join(words[2:]), flush=True)
    environ = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    seen: Numbers = {}
    begun = time.monotonic()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ) as process:
        for line in process.stdout or ():
            for key, mark in (("first line", ""), ("header", "run folder"), ("first", "step 1/")):
                if mark in line:
                    seen.setdefault(key, time.monotonic() - begun)
    if process.returncode:
        raise RuntimeError(f"fullshard train ended with {process.returncode}")
    return seen


def quality(bench: Bench) -> None:
    """Held-out losses of the same run in bf16 and in float8, on text that is not repeated."""
    sources(bench.folder / "reference.jsonl", 400_000 if bench.tiny else 24_000_000)
    steps = bench.steps or (6 if bench.tiny else QUALITY_STEPS)
    words = ["data.holdout=0.03", "evaluate.parts=[loss]", "checkpoint.best=null"]
    words += [] if bench.tiny else ["data.sequence_length=2048"]
    losses = {}
    for name, precision in (("bf16", "precision=bf16"), ("float8", bench.float8)):
        settings = bench.words(*words, precision, batch=4, steps=steps)
        found = run(bench.folder, name, *settings, kind="validation")
        losses[name] = found[-1]["loss"]
    print("\n| precision | steps | held-out loss | from bf16 |\n|---|---|---|---|")
    for name, loss in losses.items():
        print(f"| {name} | {steps} | {loss:.5f} | {loss / losses['bf16'] - 1:+.2%} |")


def sources(path: Path, most: int) -> None:
    """So many characters of the Python files of installed packages, each text once."""
    seen: set[int] = set()
    size = 0
    with path.open("w") as file:
        for text in _files():
            if size >= most:
                return
            if hash(text) not in seen:
                seen.add(hash(text))
                size += len(text)
                file.write(json.dumps({"text": text}) + "\n")


def _files() -> Iterator[str]:
    import torch

    files = sorted(Path(torch.__file__).parents[1].rglob("*.py"))
    random.Random(0).shuffle(files)
    for place in files:
        text = place.read_text(errors="ignore")
        if 500 < len(text) < 200_000:
            yield text


def show(row: str, found: dict[str, Numbers | None]) -> None:
    """A table; the ratio is that to the last job, which is the peer."""
    keys = ("first line", "header", "first") if row == "start" else ("rate", "mfu", "memory")
    heads = {"rate": "pairs/s" if row == "embedding" else "tokens/s", "mfu": "of 989 TFLOP/s", "memory": "peak GiB"}
    heads |= {"first line": "first line s", "header": "header s", "first": "first update s"}
    shapes = {"rate": ",.0f", "mfu": ".1%", "memory": ".1f"}
    base = list(found.values())[-1] or {}
    known = next((n for n in found.values() if n and n.get("mfu")), {})
    print(f"\n| {row} | " + " | ".join(heads[key] for key in keys) + " | times the last |")
    print("|---|" + "---|" * (len(keys) + 1))
    for label, each in found.items():
        if each is None:
            print(f"| {label} | not available" + " |" * (len(keys) + 1))
            continue
        if "mfu" in keys and not each.get("mfu") and known:  # the same model and formula
            each = each | {"mfu": known["mfu"] * each["rate"] / known["rate"]}
        cells = [format(each[key], shapes.get(key, ".1f")) if each.get(key) else "" for key in keys]
        of = keys[-1] if row == "start" else "rate"
        ratio = f"{each[of] / base[of]:.2f}" if base.get(of) else ""
        batch = f", batch {each['batch']:.0f}" if "batch" in each else ""
        print(f"| {label}{batch} | " + " | ".join(cells) + f" | {ratio} |")


def facts() -> str:
    import torch

    place = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    found = []
    for name in VERSIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{datetime.date.today()}, {place}, Python {platform.python_version()}, {', '.join(found)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", nargs="?", choices=tuple(ROWS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--only", nargs="*", default=[], help="jobs whose name contains one of these words")
    parser.add_argument("--set", nargs="*", default=[], help="further key=value settings of every run of fullshard")
    parser.add_argument("--fixed", action="store_true", help="torch's segments of fixed sizes, also for fullshard")
    parser.add_argument("--quality", action="store_true", help="of float8: losses, not speed")
    for hidden in ("--one", "--folder", "--asked"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("RESULT " + json.dumps(getattr(peers, options.one)(Path(options.folder), **json.loads(options.asked))))
        return
    if options.fixed:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"
    if options.row is None:
        parser.error(f"name a row: {', '.join(ROWS)}")
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(Path(temporary), options.tiny, options.steps, tuple(options.set))
        print(facts(), flush=True)
        if options.quality:
            quality(bench)
            return
        found: dict[str, Numbers | None] = {}
        for label, job in ROWS[options.row](bench).items():
            if not options.only or any(word in label for word in options.only):
                begun = time.monotonic()
                found[label] = attempt(job)
                print(f"{label}: {found[label]} after {time.monotonic() - begun:.0f} s", flush=True)
        show(options.row, found)
        print(f"\n{facts()}")


def attempt(job: Callable[[], Numbers | None]) -> Numbers | None:
    """A job that fails must not cost the row its other jobs."""
    try:
        return job()
    except Exception as error:
        print(f"failed: {type(error).__name__}: {error}", flush=True)
        return None


if __name__ == "__main__":
    main()
