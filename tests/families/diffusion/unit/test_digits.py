"""Pictures that lie ready: scikit-learn's digits, and folders of class folders."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from fullshard.config.part import decode
from fullshard.contracts.data import Record, Records, Source
from fullshard.errors import DataError, RecipeError, SetupError
from fullshard.families.diffusion.encoders.image import Images
from fullshard.families.diffusion.image_samples import ImageCollator
from fullshard.families.diffusion.sources.digits import Digits
from fullshard.families.diffusion.sources.image_folder import ImageFolder


def rows(records: Records) -> list[Record]:
    return [records[index] for index in range(len(records))]


def folder_of(place: Path, *names: str) -> Path:
    """Empty images; only names count here."""
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"")
    return place


# --- digits


def test_the_digits_are_those_of_scikit_learn() -> None:
    theirs, found = load_digits(), rows(Digits().open())
    images = np.stack([row["image"] for row in found])
    assert images.shape == (1797, 8, 8)
    assert images.dtype == np.uint8
    # Back to their 17 shades of grey, without a loss.
    assert np.array_equal(np.rint(images * (16 / 255)), theirs.images)
    assert (images.min(), images.max()) == (0, 255)
    assert [row["label"] for row in found] == theirs.target.tolist()
    assert all(type(row["label"]) is int for row in found)


def test_train_and_held_out_are_the_halves() -> None:
    everything, train, held = (rows(Digits(part=part).open()) for part in ("all", "train", "held_out"))
    assert (len(train), len(held)) == (899, 898)
    for part, start in ((train, 0), (held, 1)):
        for row, whole in zip(part, everything[start::2], strict=True):
            assert row["label"] == whole["label"]
            assert np.array_equal(row["image"], whole["image"])
        assert min(np.bincount([row["label"] for row in part])) > 80
    assert not {row["image"].tobytes() for row in train} & {row["image"].tobytes() for row in held}


def test_places_and_fingerprints_of_digits() -> None:
    held = Digits(part="held_out").open()
    assert held.where(3) == "scikit-learn's digits, number 7"
    assert held.fingerprint() == Digits(part="held_out").open().fingerprint()
    assert len({Digits(part=part).open().fingerprint() for part in ("all", "train", "held_out")}) == 3


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SetupError, match=r"kind: digits needs the package scikit-learn.*'fullshard\[diffusion\]'"):
        Digits().open()


def test_recipes_name_digits_in_every_form() -> None:
    assert decode(Source, {"kind": "digits", "part": "train"}, where="data.train") == Digits(part="train")
    with pytest.raises(RecipeError, match=r"data\.train\.part = 'test': it must be one of train, held_out, all"):
        decode(Source, {"kind": "digits", "part": "test"}, where="data.train")


def test_digits_as_they_are_learned() -> None:
    encoder = Images(classes=10)
    records = Digits(part="held_out").open()
    samples = [found.samples[0] for found in encoder.open(None, length=1).encode_many(rows(records)[:4])]
    batch = ImageCollator(encoder).collate(samples, length=None)
    theirs = load_digits()
    assert batch["images"].shape == (4, 1, 8, 8)
    assert np.allclose(batch["images"][:, 0].numpy(), theirs.images[1:8:2] / 8 - 1, atol=0.004)
    assert batch["label"].tolist() == theirs.target[1:8:2].tolist()


# --- folders


def test_labels_are_the_places_of_class_folders_by_name(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path, "dog/b.PNG", "dog/a.jpg", "cat/deep/er/x.npy", "cat/y.webp", "cat/.z.png", ".git/q.png"
    )
    folder_of(tmp_path, "cat/notes.txt", "cat/.thumbnails/y.png", "readme.md")
    records = ImageFolder(path=folder).open()
    assert [(os.path.relpath(row["path"], folder), row["label"]) for row in rows(records)] == [
        ("cat/y.webp", 0),
        ("cat/deep/er/x.npy", 0),
        ("dog/a.jpg", 1),
        ("dog/b.PNG", 1),
    ]
    assert records.where(2) == str(folder / "dog" / "a.jpg")
    assert getattr(records, "notes", None) == [
        f"{folder}: labels 0 = cat, 1 = dog",
        f"{folder}: left out, no images of a class: readme.md, notes.txt",
    ]


def test_class_folders_can_be_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a/1.png", "b/1.png", "c/1.png")
    records = ImageFolder(path=folder, classes=["c", "a"]).open()
    assert [(Path(row["path"]).parent.name, row["label"]) for row in rows(records)] == [("c", 0), ("a", 1)]
    assert "left out, no images of a class: b" in getattr(records, "notes")[1]  # noqa: B009
    with pytest.raises(DataError, match=r"the class folder 'd' does not exist\. Class folders found: a, b, c\. "):
        ImageFolder(path=folder, classes=["a", "d"]).open()
    for classes in ([], ["a", "a"]):
        with pytest.raises(RecipeError, match=r"data\.train\.classes = .*each class folder is named once"):
            decode(Source, {"kind": "image_folder", "path": str(folder), "classes": classes}, where="data.train")


def test_a_folder_without_class_folders_has_no_labels(tmp_path: Path) -> None:
    records = ImageFolder(path=folder_of(tmp_path, "b.png", "a.png", "text.md")).open()
    assert rows(records) == [{"path": str(tmp_path / "a.png")}, {"path": str(tmp_path / "b.png")}]
    assert getattr(records, "notes", None) == [
        f"{tmp_path}: no class folders, so no labels",
        f"{tmp_path}: left out, no images of a class: text.md",
    ]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a/1.png", "2.png", "3.png"], r"2\.png and 1 other file are beside the class folders"),
        (["a/1.png", "b/text.md"], r"the class folder 'b' has no image \(\.bmp, .*\)\. Class folders found: a, b\."),
        (["text.md"], r"no image in this folder\. Found: text\.md\. Allowed: \.bmp, "),
        ([], r"no image in this folder\. Found: nothing\."),
    ],
)
def test_paths_that_are_not_image_folders(tmp_path: Path, names: list[str], words: str) -> None:
    with pytest.raises(DataError, match=words):
        ImageFolder(path=folder_of(tmp_path, *names)).open()


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: no such folder, but image_folder needs a folder"):
        ImageFolder(path=tmp_path / "nowhere").open()
    with pytest.raises(DataError, match=r"a\.png: this is a file, but"):
        ImageFolder(path=folder_of(tmp_path, "a.png") / "a.png").open()


def test_the_fingerprint_of_a_folder_follows_its_files(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a/1.png", "b/1.png")

    def now(**settings: Any) -> str:
        return ImageFolder(path=folder, **settings).open().fingerprint()

    first = now()
    assert now() == first
    assert now(classes=["b", "a"]) != first
    # The same file, with a label and without.
    assert now(classes=["a"]) != ImageFolder(path=folder / "a").open().fingerprint()
    (folder / "a" / "1.png").write_bytes(b"other")
    changed = now()
    assert changed != first
    os.utime(folder / "a" / "1.png", ns=(1, 1))
    assert now() not in (first, changed)
    folder_of(tmp_path, "b/2.png")
    assert now() != changed


def test_a_relative_folder_is_found_whatever_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        Image.new("L", (4, 4), ord(name)).save(tmp_path / "pets" / name / "x.png")
    encoder = Images(root=tmp_path / "elsewhere")
    for row, colour in zip(rows(ImageFolder(path=Path("pets")).open()), b"ab", strict=True):
        assert (encoder.open(None, length=1).encode(row).samples[0]["image"] == colour).all()
