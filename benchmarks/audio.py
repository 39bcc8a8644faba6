"""LoRA of an audio language model on one GPU with real decoded clips: tokens and seconds of audio per second, and
memory, beside the same job in HF Trainer.

    python benchmarks/audio.py [--tiny] [--steps 20] [--precision fp16]

The shape of Phi-4-multimodal with random weights and adapters of rank 64 in the language model; FLAC files of 3 to 8
seconds and texts of Python's language reference. In both, the frozen base is in the compute precision, the adapters and
their Adam states are in fp32, every block is recomputed, and equally many workers decode clips. fullshard packs
conversations into rows; the peer pads them, as its collators do. Only real tokens count. Each runs in its own process,
product and peer in turn. `--tiny` runs everything in seconds on a CPU, for the script's own sake.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.side_by_side import compare

ROWS, LENGTH, WORKERS, WARMUP, RATE = 4, 2048, 8, 4, 16_000
CONVERSATIONS = 56
"""Of a batch of the peer: about as many as fullshard packs into its rows."""


def write_data(folder: Path, count: int, *, tiny: bool) -> None:
    """Conversations about one clip each."""
    from pydoc_data.topics import topics

    import numpy as np
    import soundfile

    words = " ".join(topics[key] for key in sorted(topics)).split()
    draw = random.Random(0)
    (folder / "clips").mkdir()
    with (folder / "chats.jsonl").open("w") as file:
        for number in range(count):
            noise = np.random.default_rng(number)
            seconds = draw.uniform(0.3, 0.8) if tiny else draw.uniform(3, 8)
            times = np.arange(int(seconds * RATE)) / RATE
            tone = 0.3 * np.sin(2 * np.pi * noise.uniform(80, 400) * times) + 0.01 * noise.standard_normal(len(times))
            soundfile.write(folder / "clips" / f"{number}.flac", tone.astype(np.float32), RATE)
            at, answer = draw.randrange(len(words) - 99), draw.randint(20, 60)
            asked = {"prompt": " ".join(words[at : at + 8]), "response": " ".join(words[at + 8 :][:answer])}
            file.write(json.dumps({"audio_path": f"{number}.flac", **asked}) + "\n")


def model_folder(folder: Path, *, precision: str, tiny: bool) -> Path:
    """A model with random weights in the compute precision and its feature extractor, made once for both."""
    import torch
    from transformers import Phi4MultimodalForCausalLM

    from fullshard.recipes.read import read

    path = folder / "model"
    if path.exists():
        return path
    size = {"size": "tiny"} if tiny else {"overrides": {"hidden_size": 3072, "num_hidden_layers": 32}}
    scratch = {"kind": "audio_lm", "architecture": "phi4_multimodal", "tokenizer": {"train": {"vocab_size": 2048}}}
    part: Any = read({"name": "scratch", "model": scratch | size, "data": {"train": "x"}}).recipe.model
    part.prepare((folder / "chats.jsonl").read_text().splitlines(), cache=folder / "cache")
    processor, config = part.processor(cache=folder / "cache"), part._config()
    part._fit_vocabulary(config, processor)
    base = torch.float32 if tiny else {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with torch.device("cpu" if tiny else "cuda"):
        Phi4MultimodalForCausalLM._from_config(config, dtype=base).save_pretrained(path)
    processor.save_pretrained(path)
    if not tiny:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return path


def model_settings(path: Path) -> dict[str, Any]:
    return {"kind": "audio_lm", "path": str(path), "lora": "paper_r64"}


def product(folder: Path, *, precision: str, steps: int, tiny: bool) -> dict[str, float]:
    """fullshard, packed."""
    from fullshard.log.metrics import read as read_metrics
    from fullshard.recipes.read import read
    from fullshard.run import execute

    path = model_folder(folder, precision=precision, tiny=tiny)
    reading = read(
        {
            "name": "product",
            "output": str(folder),
            "model": model_settings(path),
            "objective": "audio_lm",
            "data": {
                "train": str(folder / "chats.jsonl"),
                "encode": {"kind": "audio_chat", "audio_root": str(folder / "clips")},
                "sequence_length": 256 if tiny else LENGTH,
                "pack": True,
                "holdout": 0,
                "workers": 0 if tiny else WORKERS,
                "cache": str(folder / "cache"),
            },
            "batch": {"per_device": ROWS},
            "duration": {"steps": steps},
            "optimizer": {"lr": 1e-5},
            "precision": "fp32" if tiny else precision,
            "sharding": {"activation_checkpointing": "full"},
            "checkpoint": {"every_epochs": None, "at_end": False, "best": None},
            "evaluate": {"parts": []},
            "log": {"every_steps": 1, "sinks": []},
        }
    )
    execute(reading, resume="never")
    records = [r for r in read_metrics(reading.recipe.folder / "metrics.jsonl") if r["kind"] == "train"][WARMUP:]
    return {
        "tokens": statistics.median(r["tokens_per_second"] for r in records),
        "audio": statistics.median(r["audio_seconds_per_second"] for r in records),
        "memory": max(r.get("memory_gib", 0.0) for r in records),
        "wait": statistics.median(r["data_wait"] for r in records),
    }


def peer(folder: Path, *, precision: str, steps: int, tiny: bool) -> dict[str, float]:
    """HF Trainer with peft; conversations padded to the longest of a batch."""
    import peft
    import torch
    from transformers import Phi4MultimodalForCausalLM, TrainingArguments

    from fullshard.recipes.read import read

    path = model_folder(folder, precision=precision, tiny=tiny)
    part: Any = read({"name": "peer", "model": model_settings(path), "data": {"train": "x"}}).recipe.model
    processor = part.processor(cache=folder / "cache")
    base = torch.float32 if tiny else {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    model = Phi4MultimodalForCausalLM.from_pretrained(path, dtype=base).to("cpu" if tiny else "cuda")
    model.config.use_cache = False
    settings = peft.LoraConfig(r=64, lora_alpha=128, lora_dropout=0.05, target_modules=LANGUAGE)
    adapted = peft.get_peft_model(model, settings)
    adapted.enable_input_require_grads()
    arguments = TrainingArguments(
        output_dir=str(folder / "peer"),
        max_steps=steps,
        per_device_train_batch_size=4 if tiny else CONVERSATIONS,
        learning_rate=1e-5,
        bf16=not tiny and precision == "bf16",
        fp16=not tiny and precision == "fp16",
        gradient_checkpointing=True,
        dataloader_num_workers=0 if tiny else WORKERS,
        dataloader_drop_last=True,
        remove_unused_columns=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        optim="adamw_torch_fused",
        use_cpu=tiny,
        label_names=["labels"],
    )
    timed = _timed()(adapted, arguments, train_dataset=Chats(folder, processor), data_collator=Padded())
    timed.train()
    memory = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    return {key: statistics.median(r[key] for r in timed.rates[WARMUP:]) for key in timed.rates[0]} | {"memory": memory}


LANGUAGE = r"(model\.)?layers\.\d+\.(self_attn\.(qkv_proj|o_proj)|mlp\.(gate_up_proj|down_proj))"
"""The linear layers of the language model."""


def _timed() -> Any:
    from transformers import Trainer

    class Timed(Trainer):
        """Counts what each step trains on, and how long it waits for data and takes."""

        rates: list[dict[str, float]]

        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            now = time.monotonic()
            if getattr(self, "_begun", None) is not None:
                self.__dict__.setdefault("rates", []).append(self._rate(now))
            self._begun = now
            found = super().get_batch_samples(epoch_iterator, num_batches, device)
            self._waited, self._batch = time.monotonic() - now, found[0][0] if found[0] else None
            return found

        def _rate(self, now: float) -> dict[str, float]:
            took = now - self._begun
            tokens = int(self._batch["attention_mask"].sum())
            return {
                "tokens": tokens / took,
                "audio": float(self._batch["audio_seconds"]) / took,
                "wait": self._waited / took,
            }

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
            return super().compute_loss(
                model, {k: v for k, v in inputs.items() if k != "audio_seconds"}, *arguments, **named
            )

    return Timed


class Chats:
    """The records, with their clip decoded and made into features."""

    def __init__(self, folder: Path, processor: Any) -> None:
        self._folder, self._processor = folder, processor
        self._lines = (folder / "chats.jsonl").read_text().splitlines()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import soundfile

        record = json.loads(self._lines[index])
        clip, _ = soundfile.read(self._folder / "clips" / record["audio_path"], dtype="float32")
        tokenizer, text = self._processor.tokenizer, self._processor.clip_text(len(clip))
        before = tokenizer(f"User: {text}{record['prompt']}\nAssistant: ")["input_ids"]
        answer = tokenizer(record["response"])["input_ids"] + [tokenizer.eos_token_id]
        ids, labels = before + answer, [-100] * len(before) + answer
        return {"ids": ids, "labels": labels, "clip": clip, "extract": self._processor.extractor}


class Padded:
    """A batch padded on the right."""

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        longest = max(len(sample["ids"]) for sample in samples)

        def padded(key: str, fill: int) -> Any:
            return torch.tensor([sample[key] + [fill] * (longest - len(sample[key])) for sample in samples])

        mask = [[1] * len(sample["ids"]) + [0] * (longest - len(sample["ids"])) for sample in samples]
        clips = [sample["clip"] for sample in samples]
        found = dict(samples[0]["extract"](clips, sampling_rate=RATE, return_tensors="pt"))
        return {
            "input_ids": padded("ids", 0),
            "labels": padded("labels", -100),
            "attention_mask": torch.tensor(mask),
            "audio_seconds": torch.tensor(sum(map(len, clips)) / RATE),
            **found,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=("bf16", "fp16"), default="bf16")
    compare(
        parser,
        {"product": product, "peer": peer},
        write_data,
        {
            "tokens": ("tokens/s", ",.0f"),
            "audio": ("s audio/s", ".1f"),
            "memory": ("peak GiB", ".1f"),
            "wait": ("data wait", ".1%"),
        },
    )


if __name__ == "__main__":
    main()
