"""Evaluations of vision-language models: outside training they give the numbers of training; any pattern of images over
ranks and micro-batches finishes with the numbers of a plain loop; generated answers are shown with their pictures."""

from __future__ import annotations

import functools
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.families.vision.models.vlm import Vlm
from fullshard.log.metrics import FILE, read
from tests.families.vision.small import MODELS, model_folder, processed, settings, write_records
from tests.families.vision.test_docs import PAGE
from tests.ranks import RankPool
from tests.shrunk_recipes import shrunk
from tests.slow import one_in, only_first
from tests.small import train

NOT_NUMBERS = ("kind", "step", "epoch", "time")


def command(*words: str) -> tuple[int, str, str]:
    """The command on one rank of the pool, which was started by a launcher."""
    done = CliRunner().invoke(app, [*words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def evaluate(ranks: RankPool, *words: Any, world: int) -> dict[str, Any]:
    """What rank 0 prints with --json."""
    (code, said, told), *_ = ranks.run(command, "evaluate", *map(str, words), "--json", world=world)
    assert code == 0, told
    return json.loads(said)  # type: ignore[no-any-return]


def validated(run: Path) -> dict[str, float]:
    """The numbers of the last validation in training."""
    last = [record for record in read(run / FILE) if record["kind"] == "validation"][-1]
    return {key: value for key, value in last.items() if key not in NOT_NUMBERS}


def train_built_in(name: str, *changes: str) -> None:
    """One rank of a built-in recipe."""
    from fullshard.recipes.read import read as read_recipe
    from fullshard.run import execute

    execute(read_recipe(name, *changes), resume="never")


@pytest.mark.parametrize("name", only_first(["vision", "desktop"]))
def test_outside_training_the_numbers_are_the_same(ranks: RankPool, tmp_path: Path, name: str) -> None:
    small = ["data.sequence_length=192", "optimizer.lr=1e-2", "precision=fp32"]
    places = [f"output={tmp_path / 'runs'}", f"data.cache={tmp_path / 'cache'}"]
    ranks.run(train_built_in, name, *shrunk(name, tmp_path), *small, *places, world=2)
    run = tmp_path / "runs" / name
    expected = validated(run)
    assert {"loss", "accuracy", "answers" if name == "vision" else "actions"} <= expected.keys()
    assert evaluate(ranks, run / "last", world=2)["numbers"] == expected
    alone = evaluate(ranks, run / "last", world=1)["numbers"]
    assert alone == pytest.approx(expected, rel=1e-6)
    if name == "vision":
        documented(ranks, tmp_path)


def documented(ranks: RankPool, folder: Path) -> None:
    """The commands of the family's page, on the run that is there."""
    message = {"role": "user", "content": [{"type": "image", "image": str(folder / "other.png")}]}
    record = {"messages": [message, {"role": "assistant", "content": "red"}]}
    (folder / "held_out.jsonl").write_text(json.dumps(record) + "\n")
    for file in ("picture.png", "other.png"):
        Image.new("RGB", (40, 40), "red").save(folder / file)
    lines = [line for line in PAGE.splitlines() if line.startswith(("fullshard evaluate", "fullshard generate"))]
    assert len(lines) == 4
    for line in lines:
        words = [str(folder / word) if (folder / word).exists() else word for word in shlex.split(line)[1:]]
        [(code, _, told)] = ranks.run(command, *words, world=1)
        assert code == 0, f"{line}: {told}"


PATTERNS = {
    "one of four ranks": [0, 0, 0, 1, 0, 0, 0, 0],
    "no image at all": [0] * 8,
    "only fillers beside it": [0, 0, 0, 0, 1],
    "another rank in each micro-batch": [1, 0, 0, 0, 0, 0, 2, 0],
    "all": [1, 2, 1, 3, 1, 1, 1, 1],
    "all but one": [1, 1, 0, 1, 1, 1, 1],
}
TOWERS = {"trained": "{}", "frozen": "{vision: {freeze: true}, projector: {freeze: true}}"}


@functools.cache
@torch.no_grad()
def of_record(folder: Path, line: str) -> tuple[float, int, int]:
    """The sum of a record's losses, its right tokens and its tokens, in Transformers alone."""
    model = AutoModelForImageTextToText.from_pretrained(folder / "model").eval()
    inputs = processed(folder, json.loads(line))
    labels = inputs.pop("labels")[0, 1:]
    logits = model(**inputs).logits[0, :-1].float()
    loss = cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    learned = labels != -100
    return float(loss), int((logits.argmax(-1) == labels)[learned].sum()), int(learned.sum())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("patterns")
    model_folder(path / "model", "llava")
    return path


@pytest.mark.parametrize("towers", TOWERS)
@pytest.mark.parametrize("pattern", one_in(3, PATTERNS))
def test_ranks_without_images_wait_for_none(
    ranks: RankPool, folder: Path, tmp_path: Path, pattern: str, towers: str
) -> None:
    """Every rank evaluates one record at a time; answers are shown by fewer ranks than there are."""
    records = write_records(tmp_path, PATTERNS[pattern])
    (tmp_path / "model").symlink_to(folder / "model")
    found = [of_record(tmp_path, line) for line in records.read_text().splitlines()]
    loss, right, tokens = map(sum, zip(*found, strict=True))
    words = [
        *("--data", records, f"data.encode={{kind: image_chat, image_root: {tmp_path / 'images'}}}"),
        *("data.sequence_length=512", "data.pack=false", f"data.cache={tmp_path}", "evaluate.per_device=1"),
        *("evaluate.parts=[loss, {kind: answers, show: 3, show_tokens: 4}]", f"model.towers={TOWERS[towers]}"),
        *("topology.device=cpu", "precision=fp32"),
    ]
    numbers = {world: evaluate(ranks, folder / "model", *words, world=world) for world in (4, 1)}
    for each in numbers.values():
        assert each["numbers"]["loss"] == pytest.approx(loss / tokens, rel=1e-6)
        assert each["numbers"]["accuracy"] == pytest.approx(right / tokens, rel=1e-6)
    assert numbers[4]["texts"] == numbers[1]["texts"], "the same samples are shown, with the same answers"


@torch.no_grad()
def by_transformers(folder: Path, record: dict[str, Any], tokenizer: Any, tokens: int) -> list[int]:
    """What the exported model answers to a record."""
    inputs = processed(folder, record)
    asked = int((inputs.pop("labels")[0] != -100).nonzero()[0])
    cut = {
        name: value[:, :asked] if value.shape == inputs["input_ids"].shape else value for name, value in inputs.items()
    }
    model = AutoModelForImageTextToText.from_pretrained(folder / "model").eval()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    made = model.generate(**cut, max_new_tokens=tokens, do_sample=False, **ends)
    return made[0, asked:].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("architecture", only_first(["qwen2_5_vl", *(m for m in MODELS if m != "qwen2_5_vl")]))
def test_answers_are_shown_with_their_pictures(ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    """The first samples with images, at every validation, also from packed rows, with the tokens of Transformers."""
    model_folder(tmp_path / "model", architecture)
    prefix = "paligemma" in architecture  # needs images, has no chat template, does not pack
    records = write_records(tmp_path, [1] * 6 if prefix else [0, 1, 0, 2, 1, 1])
    numbers, end = ((0, 1, 2), "") if prefix else ((1, 3, 4), " Assistant:")
    chosen = settings(tmp_path, "run", duration={"steps": 2}, optimizer={"lr": 1e-4}, log={"sinks": ["tensorboard"]})
    chosen["data"] |= {"validation": str(records), "pack": not prefix, "sequence_length": 400}
    chosen["evaluate"] = {"every_steps": 1, "parts": [{"kind": "answers", "show": 3, "show_tokens": 5}]}
    ranks.run(train, chosen, world=2)
    run = tmp_path / "runs" / "run"
    assert sorted(file.name for file in (run / "pictures").iterdir()) == [
        f"answers-{step}.{kind}" for step in (1, 2) for kind in ("md", "png")
    ]
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    tokenizer = Vlm(path=str(tmp_path / "model")).load_processor(tmp_path / "model", where="model").tokenizer
    (run / "images").symlink_to(tmp_path / "images")
    rows = [line.split(" | ") for line in (run / "pictures" / "answers-2.md").read_text().splitlines()[2:]]
    for row, number in zip(rows, numbers, strict=True):
        made = by_transformers(run, lines[number], tokenizer, 5)
        assert row[1].endswith(f"What colour is this? {number}{end}")
        assert row[2] == lines[number]["messages"][1]["content"]
        assert row[3] == " ".join(tokenizer.decode(made, skip_special_tokens=True).split())
    events = EventAccumulator(str(run / "logs"))
    events.Reload()
    assert [event.step for event in events.Images("answers")] == [1, 2]
    assert (
        f"What colour is this? {numbers[-1]}"
        in events.Tensors("answers/text_summary")[0].tensor_proto.string_val[0].decode()
    )
    with Image.open(run / "pictures" / "answers-2.png") as sheet:
        pixels = np.asarray(sheet.convert("RGB")).reshape(-1, 3)
    colours = {tuple(map(int, pixel)) for pixel in np.unique(pixels, axis=0)}
    assert {(0, 128, 0), (255, 0, 0), (0, 0, 255) if prefix else (0, 0, 0)} <= colours, "the drawn pictures are on it"
