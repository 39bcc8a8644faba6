"""Rows that hold finished windows train like the same windows made on the fly, and are checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fullshard.config.part import decode
from fullshard.contracts.data import Features, Source
from fullshard.errors import DataError
from fullshard.families.vision.desktop.formats import FormatName
from fullshard.families.vision.encoders.desktop import Desktop
from fullshard.families.vision.image_samples import stored_images
from fullshard.families.vision.models.vlm import Vlm
from fullshard.families.vision.sources.desktop_episodes import DesktopEpisodes
from tests.families.vision.desktop.samples import everything
from tests.families.vision.small import model_folder, settings
from tests.small import train

LENGTH = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    model_folder(folder / "model", "smolvlm")
    rows = [dict(row) for row in everything(DesktopEpisodes(episodes=3, size=32).open())]
    (folder / "screens").mkdir()
    for number, row in enumerate(rows):
        if isinstance(row["message"], bytes):
            (folder / "screens" / f"{number}.png").write_bytes(row["message"])
            row["message"] = {"media_ref": {"uri": f"{number}.png"}}
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def opened(folder: Path, name: FormatName = "factorized", length: int = LENGTH, **more: Any) -> tuple[Desktop, Any]:
    encoder = Desktop(format=name, image_root=folder / "screens", **more)
    processor = Vlm(path=str(folder / "model")).load_processor(folder / "model", where="model.path")
    processor.tokenizer.add_tokens(encoder.added_tokens(), special_tokens=True)
    return encoder, encoder.open(processor, length=length)


def encoded(folder: Path, path: Path, name: FormatName = "factorized", **more: Any) -> list[Features]:
    encoder, opened_encoder = opened(folder, name, **more)
    records = encoder.arranged(decode(Source, {"path": str(path)}, where="data.train").open())
    return [sample for at in range(len(records)) for sample in opened_encoder.encode(records[at]).samples]


def row_of(sample: Features, path: str, length: int = LENGTH) -> dict[str, Any]:
    """A sample as a row of fixed length, as the seed project stores it."""
    size = len(sample["input_ids"])
    return {
        "episode_path": path,
        "input_ids": [*sample["input_ids"].tolist(), *[0] * (length - size)],
        "attention_mask": [1] * size + [0] * (length - size),
        "images": [json.dumps({"media_ref": {"uri": data.decode()}}) for data, _ in stored_images(sample)],
        "texts": "for people",
    }


def finished(folder: Path, name: FormatName = "factorized", length: int = LENGTH) -> list[dict[str, Any]]:
    encoder, opened_encoder = opened(folder, name, length)
    records = encoder.arranged(decode(Source, {"path": str(folder / "events.jsonl")}, where="data.train").open())
    return [
        row_of(sample, str(records[at]["episode_path"]), length)
        for at in range(len(records))
        for sample in opened_encoder.encode(records[at]).samples
    ]


def written(rows: list[dict[str, Any]], path: Path) -> Path:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("file", ["rows.jsonl", "rows.parquet", "rows"])
def test_samples_are_those_of_the_events(folder: Path, tmp_path: Path, file: str) -> None:
    same(encoded(folder, written(finished(folder), tmp_path / file)), encoded(folder, folder / "events.jsonl"))


@pytest.mark.parametrize("name", ["hierarchical", "json"])
def test_other_formats(folder: Path, tmp_path: Path, name: FormatName) -> None:
    path = written(finished(folder, name, 512), tmp_path / "rows.jsonl")
    same(encoded(folder, path, name, length=512), encoded(folder, folder / "events.jsonl", name, length=512))


def same(found: list[Features], expected: list[Features]) -> None:
    assert len(found) == len(expected) > 2
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all((one[key] == other[key]).all() for key in one)


def test_the_losses_are_equal(folder: Path, tmp_path: Path) -> None:
    rows = written(finished(folder), tmp_path / "rows.jsonl")
    losses = []
    for name, path in (("events", folder / "events.jsonl"), ("rows", rows)):
        data = {
            "train": str(path),
            "encode": {"kind": "desktop", "image_root": str(folder / "screens")},
            "sequence_length": LENGTH,
        }
        recipe = settings(folder, name, data=data, batch={"per_device": 4, "global": 4}, duration={"steps": 2})
        losses.append(
            [record["loss"] for record in train({**recipe, "output": str(tmp_path)}) if record["kind"] == "train"]
        )
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]


def test_windows_of_an_episode_may_be_apart(folder: Path, tmp_path: Path) -> None:
    rows = finished(folder)
    path = written(rows[::2] + rows[1::2], tmp_path / "rows.jsonl")
    records = opened(folder)[0].arranged(decode(Source, {"path": str(path)}, where="data.train").open())
    assert len(records) == 3
    assert len(encoded(folder, path)) == len(rows)


def moved(row: dict[str, Any], image: int) -> list[int]:
    """The tokens of a row, with the first image token and the token before it exchanged."""
    ids = list(row["input_ids"])
    first = ids.index(image)
    ids[first - 1], ids[first] = image, ids[first - 1]
    return ids


ELSEWHERE = json.dumps({"media_ref": {"uri": "no.png"}})
BAD: dict[str, tuple[Callable[[dict[str, Any], int], dict[str, Any]], str]] = {
    "an id too high": (lambda row, _: {"input_ids": [10**6, *row["input_ids"][1:]]}, "'input_ids' has 1,000,000, but"),
    "an image too many": (lambda row, _: {"images": [*row["images"], row["images"][0]]}, r"for \d+ images"),
    "an image too few": (lambda row, _: {"images": row["images"][1:]}, "but the model needs"),
    "an image that is missing": (lambda row, _: {"images": [ELSEWHERE]}, "does not exist"),
    "tokens of an image apart": (lambda row, image: {"input_ids": moved(row, image)}, r"of images\[0\] \(32x32\)"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_rows(folder: Path, tmp_path: Path, bad: str) -> None:
    spoil, said = BAD[bad]
    first, second, *_ = finished(folder)
    spoiled = {**second, **spoil(second, opened(folder)[1].processor.image_token_id)}
    with pytest.raises(DataError, match=said) as caught:
        encoded(folder, written([first, spoiled], tmp_path / "rows.jsonl"))
    assert "rows.jsonl:2: " in str(caught.value)


def test_a_window_longer_than_the_recipe_allows(folder: Path, tmp_path: Path) -> None:
    path = written(finished(folder), tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match="tokens, but data.sequence_length = 64. Raise it"):
        encoded(folder, path, length=64)
