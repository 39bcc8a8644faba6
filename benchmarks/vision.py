"""Fine-tuning of a vision-language model on one GPU with real decoded images: tokens and images per second, and memory,
beside the same job in accelerate's FSDP2.

    python benchmarks/vision.py [--tiny] [--steps 20] [--shape SmolVLM2-2.2B]

The shape of Qwen2.5-VL-3B or SmolVLM2-2.2B with random weights; JPEG files of 640 x 480 and texts of Python's language
reference. Both keep fp32 parameters and Adam states, compute in bf16, recompute every block and decode images in
equally many workers. fullshard packs conversations into rows; the peer pads them, as its collators do. Only real tokens
count. MFU counts the language model by tokens and the towers by image tokens, without recomputation and without the
tower's attention. Each runs in its own process, product and peer in turn. `--tiny` runs everything in seconds on a CPU,
for the script's own sake.
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

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2.5-VL-3B": (
        "qwen2_5_vl",
        {
            "text_config": {
                "hidden_size": 2048,
                "intermediate_size": 11008,
                "num_hidden_layers": 36,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "vocab_size": 151936,
                "tie_word_embeddings": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            },
            "vision_config": {
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "out_hidden_size": 2048,
                "patch_size": 14,
                "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31],
            },
        },
    ),
    "SmolVLM2-2.2B": (
        "smolvlm",
        {
            "scale_factor": 3,
            "text_config": {
                "model_type": "llama",
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 24,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "head_dim": 64,
                "vocab_size": 49280,
                "max_position_embeddings": 8192,
            },
            "vision_config": {
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "image_size": 384,
                "patch_size": 14,
            },
        },
    ),
}
PEAK = 989e12
"""Dense bf16 of an H200; of each measured rate the same share counts, product and peer."""
ROWS, LENGTH, WORKERS, WARMUP = 4, 2048, 8, 4


def write_data(folder: Path, count: int, *, tiny: bool) -> None:
    """Conversations about one picture each."""
    from pydoc_data.topics import topics

    import numpy as np
    from PIL import Image

    words = " ".join(topics[key] for key in sorted(topics)).split()
    draw = random.Random(0)
    (folder / "images").mkdir()
    size = (64, 48) if tiny else (640, 480)
    with (folder / "chats.jsonl").open("w") as file:
        for number in range(count):
            noise = np.random.default_rng(number).integers(0, 256, (12, 16, 3), dtype=np.uint8)
            Image.fromarray(noise).resize(size).save(folder / "images" / f"{number}.jpg")
            at, question, answer = draw.randrange(len(words) - 99), draw.randint(5, 15), draw.randint(20, 60)
            content = [{"type": "image", "image": f"{number}.jpg"}]
            content += [{"type": "text", "text": " ".join(words[at : at + question])}]
            said = {"role": "assistant", "content": " ".join(words[at + question :][:answer])}
            file.write(json.dumps({"messages": [{"role": "user", "content": content}, said]}) + "\n")


def model_settings(shape: str, *, tiny: bool) -> dict[str, Any]:
    architecture, overrides = SHAPES[shape]
    size = {"size": "tiny"} if tiny else {"overrides": overrides}
    return {"kind": "vlm", "architecture": architecture, "tokenizer": {"train": {"vocab_size": 2048}}, **size}


def product(folder: Path, *, shape: str, steps: int, tiny: bool) -> dict[str, float]:
    """fullshard, packed."""
    from fullshard.log.metrics import read as read_metrics
    from fullshard.recipes.read import read
    from fullshard.run import execute

    reading = read(
        {
            "name": "product",
            "output": str(folder),
            "model": model_settings(shape, tiny=tiny),
            "objective": "vision_lm",
            "data": {
                "train": str(folder / "chats.jsonl"),
                "encode": {"kind": "image_chat", "image_root": str(folder / "images")},
                "sequence_length": 256 if tiny else LENGTH,
                "holdout": 0,
                "workers": 0 if tiny else WORKERS,
                "cache": str(folder / "cache"),
            },
            "batch": {"per_device": ROWS},
            "duration": {"steps": steps},
            "optimizer": {"lr": 1e-5},
            "precision": "fp32" if tiny else "bf16",
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
        "images": statistics.median(r["images_per_second"] for r in records),
        "memory": max(r.get("memory_gib", 0.0) for r in records),
        "wait": statistics.median(r["data_wait"] for r in records),
        "mfu": statistics.median(r.get("mfu", 0.0) for r in records),
    }


def peer(folder: Path, *, shape: str, steps: int, tiny: bool) -> dict[str, float]:
    """accelerate's FSDP2 with Transformers' model and processor; conversations padded to the longest of a batch."""
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from transformers import AutoModelForImageTextToText

    from fullshard.recipes.read import read

    model_part = read({"name": "peer", "model": model_settings(shape, tiny=tiny), "data": {"train": "x"}}).recipe.model
    texts = (folder / "chats.jsonl").read_text().splitlines()
    model_part.prepare(texts, cache=folder / "cache")
    processor = model_part.processor(cache=folder / "cache")
    config = model_part._config()  # type: ignore[attr-defined]
    model_part._fit_vocabulary(config, processor)  # type: ignore[attr-defined]
    config.use_cache = config.text_config.use_cache = False
    empty = model_part.build(processor=processor)
    per_token = model_part.flops_per_token(empty, length=LENGTH)
    per_image_token = model_part.media_flops(empty)["image_tokens"]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", activation_checkpointing=True
    )
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="no" if tiny else "bf16", cpu=tiny)
    with accelerator.device:
        model = AutoModelForImageTextToText.from_config(config)
    loader: Any = torch.utils.data.DataLoader(
        Chats(folder, texts),
        batch_size=ROWS * 4,
        shuffle=True,
        drop_last=True,
        num_workers=0 if tiny else WORKERS,
        collate_fn=Padded(processor, shape),
        pin_memory=not tiny,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    rates: list[dict[str, float]] = []
    batches = iter(loader)
    for _ in range(steps):
        begun = time.monotonic()
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        waited = time.monotonic() - begun
        counts = int(batch["attention_mask"].sum()), ROWS * 4
        of_images = int((batch["input_ids"] == processor.image_token_id).sum())
        loss = model(**batch, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        float(loss.detach())
        took = time.monotonic() - begun
        spent = counts[0] * per_token + of_images * per_image_token
        rates.append(
            {
                "tokens": counts[0] / took,
                "images": counts[1] / took,
                "wait": waited / took,
                "mfu": spent / took / PEAK,
            }
        )
    memory = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    return {key: statistics.median(r[key] for r in rates[WARMUP:]) for key in rates[0]} | {"memory": memory}


class Chats:
    """The records, with their image decoded."""

    def __init__(self, folder: Path, lines: list[str]) -> None:
        self._folder, self._lines = folder, lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> tuple[list[dict[str, Any]], Any]:
        from PIL import Image

        messages = json.loads(self._lines[index])["messages"]
        return messages, Image.open(self._folder / "images" / messages[0]["content"][0]["image"]).convert("RGB")


class Padded:
    """A batch as Transformers' documentation makes it: padded on the right, the answer as labels."""

    def __init__(self, processor: Any, shape: str) -> None:
        self._processor, self._image_token = processor.whole, processor.image_token_id
        self._more = {"return_mm_token_type_ids": True} if shape.startswith("Qwen") else {}

    def __call__(self, samples: list[tuple[list[dict[str, Any]], Any]]) -> dict[str, Any]:
        texts = [self._processor.tokenizer.apply_chat_template(m, tokenize=False) for m, _ in samples]
        found = self._processor(
            text=texts,
            images=[[image] for _, image in samples],
            return_tensors="pt",
            padding=True,
            **self._more,
        )
        labels = found["input_ids"].clone()
        labels[found["attention_mask"] == 0] = -100
        labels[found["input_ids"] == self._image_token] = -100
        return {**found, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=tuple(SHAPES), default="Qwen2.5-VL-3B")
    compare(
        parser,
        {"product": product, "peer": peer},
        write_data,
        {
            "tokens": ("tokens/s", ",.0f"),
            "images": ("images/s", ".1f"),
            "memory": ("peak GiB", ".1f"),
            "wait": ("data wait", ".1%"),
            "mfu": ("MFU", ".1%"),
        },
    )


if __name__ == "__main__":
    main()
