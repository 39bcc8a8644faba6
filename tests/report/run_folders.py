"""Run folders as `fullshard train` leaves them, made in milliseconds: every family, every way to end, any length."""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

import fullshard
from fullshard.config.part import plain
from fullshard.formatting.yaml_text import render
from fullshard.log.metrics import encode

HEADER = (
    ("world", "2 ranks, CPU, gloo"),
    ("units", "2 x Qwen3DecoderLayer, 1 x Qwen3ForCausalLM"),
    ("optimizer", "adamw, lr 0.003, cosine schedule after 36 steps of warm-up, gradients clipped"),
    ("", "at norm 1"),
    ("proven", "positions do not see later tokens (0.0e+00; earlier ones move them by 1.2e+00)"),
    ("proven", "padding changes nothing (0.0e+00)"),
)


def train_record(step: int, **more: Any) -> dict[str, Any]:
    """A logged step with a loss that falls."""
    return {
        "kind": "train",
        "step": step,
        "epoch": step / 1000,
        "loss": 2 + 5 * math.exp(-step / 300) + 0.3 * math.sin(step * 1.7),
        "lr": 1e-3 / (1 + step / 500),
        "grad_norm": 1 + 0.5 * math.cos(step),
        "samples": 4 * step,
        "tokens": 512 * step,
        "seconds": 0.05 * step,
        "tokens_per_second": 9000.0 + step % 7 * 100,
        "mfu": 0.41 + step % 5 / 100,
        "data_wait": 0.01,
        "memory_gib": 61.25,
        "predicted_memory_gib": 60.0,
        "host_memory_gib": 8.5,
        "time": {"data": 0.001, "compute": 0.045, "log": 0.001, "evaluate": 0.002, "save": 0.001},
        **more,
    }


def write_run(
    folder: Path,
    *,
    records: Sequence[Mapping[str, Any]],
    recipe: str = "quickstart",
    settings: Sequence[str] = (),
    said: Sequence[str] = (),
    facts: Mapping[str, Any] | None = None,
    total: int = 100,
) -> Path:
    """A run folder with these records in metrics.jsonl; `said` are more lines of its log."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(encode(record) + "\n" for record in records))
    values = plain(fullshard.read(recipe, f"name={folder.name}", *settings))
    run = {
        "name": recipe,
        "source": f"built-in recipe {recipe}",
        "stage": None,
        "overridden": [],
        "command": ["/usr/bin/fullshard", "train", recipe, *settings],
        "folder": "/somewhere",
        "git_commit": "0123abc",
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        **(facts or {}),
    }
    (folder / "recipe.resolved.yaml").write_text(render({**values, "run": run}))
    rows = [f"  {key:<12} {text}" for key, text in (*HEADER, ("steps", f"{total:,} = 1 epoch x {total}"))]
    lines = [f"fullshard: {folder.name}", *rows, "", "First update proven: 25 parameters changed.", *said]
    (folder / "log.txt").write_text("".join(f"2026-11-18 14:20:45 rank 0  {line}\n" for line in lines))
    unit = {"class_name": "Qwen3DecoderLayer", "parameters": 164_160, "trainable": 164_160, "storage": ["float32"]}
    unit |= {"compute": "bfloat16", "reduce": "float32", "tied": []}
    units = [{"name": f"model.layers.{layer}", **unit} for layer in range(3)]
    (folder / "units.json").write_text(json.dumps({"units": units}))
    return folder


def write_long(folder: Path, *, steps: int, spike_at: int) -> Path:
    """A run with so many logged steps, one of which has a loss of a million."""
    run = write_run(folder, records=[], total=steps)
    first, last = encode(train_record(1)).replace('"step": 1,', '"step": %d,').rsplit('"time"', 1)
    before, loss, after = re.split(r'("loss": )[\d.]+', first)
    line = f'{before}{loss}%r{after}"time"{last}\n'.replace("%d", "%(step)d").replace("%r", "%(loss)r")
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(line % {"step": step, "loss": 1e6 if step == spike_at else 2 + 100 / step})
    return run


def finished(step: int, **more: Any) -> dict[str, Any]:
    facts = {"best": 4.5, "best_step": step, "best_by": "min loss", "stopped": "done", "seconds": 3725.0}
    return {"kind": "event", "event": "finished", "step": step, "validation": {}, **facts, **more}


def validation(step: int, **numbers: float) -> dict[str, Any]:
    return {"kind": "validation", "step": step, "epoch": 1.0, **numbers}


def event(event: str, step: int, **facts: Any) -> dict[str, Any]:
    return {"kind": "event", "event": event, "step": step, **facts}


def checkpoint(folder: Path, step: int, *, content: bytes = b"weights") -> Path:
    """A published checkpoint, with a manifest that is true."""
    made = folder / f"checkpoint-{step}"
    made.mkdir()
    (made / "__0_0.distcp").write_bytes(content)
    listed = {"__0_0.distcp": {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    (made / "manifest.json").write_text(
        json.dumps({"version": 1, "step": step, "format": "sharded", "files": listed, "tensors": {}})
    )
    (folder / "last").unlink(missing_ok=True)
    (folder / "last").symlink_to(made.name)
    return made


def crashed(folder: Path, error: str, *, ranks: int = 2) -> None:
    """A crash folder in which rank 1 has failed, and the others lost it."""
    made = folder / "crash-1"
    made.mkdir()
    (made / "start.txt").write_text("pid=1\n")
    lost = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"
    for rank in range(ranks):
        (made / f"rank-{rank}.txt").write_text(
            f"rank     {rank} of {ranks}\n\nTraceback:\n{error if rank == 1 else lost}\n"
        )
    (made / "environment.json").write_text(json.dumps({"host": "node-7", "cores": 2, "variables": {"OMP": "1"}}))


def picture(path: Path, *, side: int = 64) -> None:
    path.parent.mkdir(exist_ok=True)
    image = Image.new("RGB", (side, side))
    image.putdata([(x * 4 % 256, y * 4 % 256, (x * y) % 256) for y in range(side) for x in range(side)])
    image.save(path)


def sound(path: Path) -> None:
    """A tenth of a second of a tone."""
    path.parent.mkdir(exist_ok=True)
    held = io.BytesIO()
    with wave.open(held, "wb") as out:
        out.setparams((1, 1, 8000, 800, "NONE", ""))
        out.writeframes(bytes(int(127 + 100 * math.sin(i / 3)) for i in range(800)))
    path.write_bytes(held.getvalue())


def _language(at: Path) -> list[dict[str, Any]]:
    return [
        validation(8, loss=4.5, accuracy=0.2),
        event("texts", 8, texts=["Sample continuation of 'The':\n    The end"]),
    ]


def _reasoning(at: Path) -> list[dict[str, Any]]:
    return [validation(8, loss=3.0, reasoning_loss=1.0, answer_accuracy=0.75)]


def _embedding(at: Path) -> list[dict[str, Any]]:
    return [validation(8, **{"recall@10": 0.85, "recall@10/64": 0.75, "mrr@10": 0.6})]


def _vision(at: Path) -> list[dict[str, Any]]:
    picture(at / "pictures" / "answers-8.png")
    head, line = "|  | question | expected | answer | right |", "| --- | --- | --- | --- | --- |"
    table = f"{head}\n{line}\n| 1 | a \\| b? | red | blue | no |\n"
    (at / "pictures" / "answers-8.md").write_text(table)
    shown = event("picture", 8, name="answers", file="pictures/answers-8.png")
    return [validation(8, loss=3.0, answers=0.25), shown]


def _audio(at: Path) -> list[dict[str, Any]]:
    sound(at / "clips" / "spoken-8.wav")
    return [validation(8, wer=0.31, cer=0.12), event("audio", 8, name="spoken", file="clips/spoken-8.wav")]


def _diffusion(at: Path) -> list[dict[str, Any]]:
    picture(at / "pictures" / "samples-8.png")
    shown = event("picture", 8, name="samples", file="pictures/samples-8.png")
    return [validation(8, loss=0.4, ema_loss=0.35, fid=41.5), shown]


FAMILIES = {
    "language": ("quickstart", {}, _language),
    "reasoning": ("quickstart", {}, _reasoning),
    "embedding": ("embedding", {"pairs_per_second": 480.0}, _embedding),
    "vision": ("vision", {"images_per_second": 110.5}, _vision),
    "audio": ("audio", {"audio_seconds_per_second": 1.8}, _audio),
    "diffusion": ("diffusion", {"images_per_second": 671.0}, _diffusion),
}
"""For each family a recipe, what its steps also log, and what its validation leaves."""


def family_run(folder: Path, family: str) -> Path:
    """A finished run of a family."""
    recipe, numbers, left = FAMILIES[family]
    write_run(folder, records=[], recipe=recipe)
    records = [*(train_record(step, **numbers) for step in range(1, 9)), *left(folder), finished(8)]
    (folder / "metrics.jsonl").write_text("".join(encode(record) + "\n" for record in records))
    return folder
