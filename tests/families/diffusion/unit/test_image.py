"""Images and latents: from every kind of record to the batch, sizes against PIL's own, every error, flips, scales."""

from __future__ import annotations

import csv
import json
import pickle
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fullshard.config import problems
from fullshard.config.part import decode
from fullshard.contracts.data import Encoder, Features, Source
from fullshard.data.loader import Loader
from fullshard.data.prepare import Prepared, prepare
from fullshard.data.records import Listed
from fullshard.data.sources.files import Files
from fullshard.data.store import Store, encoded
from fullshard.errors import DataError, RecipeError
from fullshard.families.diffusion.encoders.image import Images
from fullshard.families.diffusion.image_samples import ImageCollator
from fullshard.images.reading import UNREADABLE

NOISE = np.random.default_rng(0).integers(0, 256, (12, 20, 4), dtype=np.uint8)
COLOUR = NOISE[:, :, :3]


def encode(record: dict[str, Any], **settings: Any) -> Features:
    (sample,) = Images(**settings).open(None, length=1).encode(record).samples
    return sample


def pixels(record: dict[str, Any], **settings: Any) -> np.ndarray:
    """What is stored of an image."""
    found = encode(record, **settings)["image"]
    assert found.shape[0] == 1
    return found[0]


def fault(record: dict[str, Any], **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        encode(record, **settings)
    return str(caught.value)


def batch_of(records: list[dict[str, Any]], encoder: Images) -> dict[str, Any]:
    samples = [sample for found in encoder.open(None, length=1).encode_many(records) for sample in found.samples]
    return ImageCollator(encoder).collate(samples, length=None)


def latents(
    folder: Path, count: int = 6, shape: tuple[int, ...] = (4, 2, 3), dtype: Any = np.float32
) -> list[np.ndarray]:
    """Files 0.npy, 1.npy and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    values = [np.random.default_rng(at).normal(0.5, 3, shape).astype(dtype) for at in range(count)]
    for at, value in enumerate(values):
        np.save(folder / f"{at}.npy", value)
    return values


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Files:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return Files(path=str(path))


def run(train: Source, cache: Path, encoder: Images, **settings: Any) -> Prepared:
    rest: dict[str, Any] = {"validation": None, "length": 64, "pack": False, "holdout": 0.0, "seed": 0, **settings}
    if rest["validation"] is not None:
        rest["validation"] = rest["validation"].open()
    return prepare(train=train.open(), encode=encoder, processor=None, cache=cache, say=lambda line: None, **rest)


def store_of(rows: list[dict[str, Any]], cache: Path, encoder: Images) -> Store:
    records = Listed(rows, where=lambda index: f"row {index}", fingerprint=lambda: repr(rows))
    return encoded(records, encoder.open(None, length=1), cache=cache, say=lambda line: None)


def file_of(image: Image.Image, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, **{"format": "PNG", **options})
    return file.getvalue()


# --- sources of records


def test_a_table_of_latent_files(tmp_path: Path) -> None:
    values = latents(tmp_path / "latents")
    table = [{"latent_vector_path": f"latents/{at}.npy", "label": at % 3} for at in range(6)]
    train = write_csv(tmp_path / "train.csv", table)
    data = run(train, tmp_path / "cache", Images(root=tmp_path, classes=3))
    assert data.report[0] == "encoder: image"
    assert "columns: image from latent_vector_path (by the keys of the first record)" in data.report
    assert "train: 6 records, 6 samples, not packed" in data.report
    batches = list(Loader(data.train, data.collator, per_device=4).once())
    found = torch.cat([batch["images"] for batch in batches])
    assert found.dtype == torch.float32
    # As they are, bit by bit; the last two places are fillers.
    assert np.array_equal(found[:6].numpy(), np.stack(values))
    assert torch.cat([batch["label"] for batch in batches])[:6].tolist() == [0, 1, 2, 0, 1, 2]
    assert torch.cat([batch["sample_ids"] for batch in batches]).tolist() == [0, 1, 2, 3, 4, 5, -1, -1]
    assert found.shape == (8, 4, 2, 3)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_latents_of_any_float_with_an_axis_too_many(tmp_path: Path, dtype: Any) -> None:
    (values,) = latents(tmp_path, 1, (1, 4, 2, 3), dtype)
    found = pixels({"path": str(tmp_path / "0.npy")})
    assert found.dtype == np.float32
    assert np.array_equal(found, values[0].astype(np.float32))


def test_lines_with_relative_and_absolute_paths_arrays_and_nulls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = latents(tmp_path, 2, (1, 2, 2))
    monkeypatch.chdir(tmp_path)
    rows = [
        {"path": "0.npy", "label": 4},
        {"path": str(tmp_path / "1.npy"), "label": None},
        {"path": None, "image": [[[0.5, 1.0], [1.5, 2.0]]], "label": "7"},
        {"path": "", "latent_vector_path": Path("0.npy").name, "image": "nowhere", "label": 2.0},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = run(Files(path="rows.jsonl"), tmp_path / "cache", Images())
    (batch,) = Loader(data.train, data.collator, per_device=4).once()
    given = np.array([[[0.5, 1.0], [1.5, 2.0]]], dtype=np.float32)
    assert np.array_equal(batch["images"].numpy(), np.stack([first, second, given, first]))
    assert batch["label"].tolist() == [4, -1, 7, 2]
    assert batch["label"].dtype == torch.int64


def test_a_data_set_with_images(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value
    from datasets import Image as Picture

    Image.fromarray(COLOUR).save(tmp_path / "there.png")
    columns = Features({"image": Picture(), "label": ClassLabel(names=["cat", "dog"]), "name": Value("string")})
    images = [Image.fromarray(COLOUR), {"bytes": None, "path": str(tmp_path / "there.png")}]
    table = {"image": images, "label": [1, 0], "name": ["a", "b"]}
    Dataset.from_dict(table, features=columns).save_to_disk(str(tmp_path / "saved"))
    data = run(Files(path=str(tmp_path / "saved")), tmp_path / "cache", Images(classes=2))
    assert not [line for line in data.report if line.startswith("columns")]
    (batch,) = Loader(data.train, data.collator, per_device=2).once()
    assert batch["label"].tolist() == [1, 0]
    expected = COLOUR.transpose(2, 0, 1) / 127.5 - 1
    assert np.abs(batch["images"].numpy() - expected).max() < 1e-6


def test_bytes_in_a_parquet_file(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    latent = BytesIO()
    np.save(latent, np.ones((1, 2, 2), dtype=np.float16))
    for name, content in (("images", file_of(Image.fromarray(COLOUR))), ("latents", latent.getvalue())):
        pq.write_table(pa.table({"picture": [content] * 2, "class": [3, 5]}), tmp_path / f"{name}.parquet")
    encoder = Images(column_mapping={"image": "picture", "label": "class"})
    data = run(Files(path=str(tmp_path / "images.parquet")), tmp_path / "cache", encoder)
    (batch,) = Loader(data.train, data.collator, per_device=2).once()
    assert np.array_equal(np.rint((batch["images"][1].numpy() + 1) * 127.5), COLOUR.transpose(2, 0, 1))
    assert batch["label"].tolist() == [3, 5]
    again = Images(column_mapping={"image": "picture", "label": "class"})
    data = run(Files(path=str(tmp_path / "latents.parquet")), tmp_path / "cache", again)
    assert next(iter(Loader(data.train, data.collator, per_device=2).once()))["images"].eq(1).all()


def test_a_column_mapped_to_the_label_is_not_an_image() -> None:
    record = {"path": 3, "image": COLOUR}
    assert encode(record, column_mapping={"label": "path"})["label"].tolist() == [3]


# --- images


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("1", "L"),
        ("L", "L"),
        ("LA", "L"),
        ("P", "RGB"),
        ("RGB", "RGB"),
        ("RGBA", "RGB"),
        ("CMYK", "RGB"),
        ("HSV", "RGB"),
    ],
)
@pytest.mark.parametrize("channels", [None, 1, 3])
def test_modes_are_converted_as_pil_does(mode: str, expected: str, channels: int | None) -> None:
    image = Image.fromarray(NOISE).convert(mode)
    wanted = {None: expected, 1: "L", 3: "RGB"}[channels]
    found = pixels({"image": image}, channels=channels)
    assert found.dtype == np.uint8
    own = np.asarray(image.convert(wanted))
    assert np.array_equal(found, own[None] if wanted == "L" else own.transpose(2, 0, 1))


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp", "a.bmp", "a.tiff", "a.gif"])
def test_files_of_many_formats(tmp_path: Path, name: str) -> None:
    Image.fromarray(COLOUR).save(tmp_path / name)
    with Image.open(tmp_path / name) as image:
        own = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(pixels({"path": name}, root=tmp_path), own)
    assert np.array_equal(pixels({"image": (tmp_path / name).read_bytes()}), own)
    assert np.array_equal(pixels({"image": tmp_path / name}), own)


def test_an_image_is_rotated_by_its_exif_tag(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(COLOUR).save(tmp_path / "turned.png", exif=exif)
    found = pixels({"path": str(tmp_path / "turned.png")})
    assert np.array_equal(found, np.rot90(COLOUR, -1).transpose(2, 0, 1))


def test_an_image_with_a_transparent_palette_is_read_without_a_warning(tmp_path: Path) -> None:
    Image.fromarray(COLOUR).convert("P").save(tmp_path / "table.png", transparency=bytes(range(256)))
    assert pixels({"path": str(tmp_path / "table.png")}).shape == (3, 12, 20)


@pytest.mark.parametrize(
    ("width", "height", "size"), [(20, 12, 6), (12, 20, 9), (20, 12, 30), (12, 12, 12), (13, 7, 5)]
)
def test_resized_and_cropped_as_pil_does(width: int, height: int, size: int) -> None:
    image = Image.fromarray(np.resize(COLOUR, (height, width, 3)))
    ratio = size / min(width, height)
    own = image.resize((int(width * ratio + 1e-6), int(height * ratio + 1e-6)), Image.Resampling.BICUBIC)
    rows, columns = own.height - size, own.width - size
    middle = np.asarray(own)[round(rows / 2) :, round(columns / 2) :][:size, :size]
    found = pixels({"image": image}, size=size)
    assert found.shape == (3, size, size)
    assert np.array_equal(found, middle.transpose(2, 0, 1))


@pytest.mark.parametrize("shape", [(12, 20), (12, 20, 1), (12, 20, 3), (12, 20, 4)])
@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
@pytest.mark.parametrize("kind", ["array", "list", "npy"])
def test_arrays_of_whole_numbers_are_images(shape: tuple[int, ...], dtype: Any, kind: str) -> None:
    values = np.resize(NOISE, shape).astype(dtype)
    file = BytesIO()
    np.save(file, values)
    given: Any = {"array": values, "list": values.tolist(), "npy": file.getvalue()}[kind]
    channels = 3 if shape[2:] in ((3,), (4,)) else 1
    own = values.reshape(12, 20, -1)[:, :, :channels].transpose(2, 0, 1)
    assert np.array_equal(pixels({"image": given}), own)
    assert pixels({"image": given}, channels=1, size=5).shape == (1, 5, 5)


# --- errors


def test_a_missing_file_names_the_record(tmp_path: Path) -> None:
    latents(tmp_path, 2)
    train = write_csv(tmp_path / "t.csv", [{"latent_vector_path": f"{at}.npy", "label": 0} for at in range(3)])
    with pytest.raises(DataError) as caught:
        run(train, tmp_path / "cache", Images(root=tmp_path))
    assert str(caught.value) == (
        f"{tmp_path}/t.csv:4: the file {tmp_path}/2.npy of 'latent_vector_path' cannot be read: No such file or "
        f"directory. Relative paths are taken from {tmp_path}: see data.encode.root. Fix or replace it, or set "
        "data.encode.unreadable = skip to leave those records out."
    )
    assert not list((tmp_path / "cache").glob("*.tmp-*"))
    assert f"Relative paths are taken from {Path.cwd()}" in fault({"path": "2.npy"})
    assert "Relative paths" not in fault({"path": str(tmp_path / "2.npy")})


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("text.png", b"no image", "unknown image format"),
        ("cut.png", file_of(Image.fromarray(COLOUR))[:300], "cannot be read: "),
        ("empty.npy", b"", "cannot be read: "),
        ("text.npy", b"no array at all", "cannot be read: the magic string is not correct"),
        ("folder.png", None, "cannot be read: Is a directory."),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    said = fault({"path": str(path)})
    assert said.startswith(f"the file {path} of 'path' cannot be read: ")
    assert words in said
    assert said.endswith("Fix or replace it, or set data.encode.unreadable = skip to leave those records out.")


def test_broken_files_of_a_folder_are_left_out_and_counted(tmp_path: Path) -> None:
    """The file that is broken is named, or the samples are those of a folder without it."""
    for name, broken in (("cats", 1), ("dogs", 0)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(3):
            data = file_of(Image.fromarray(COLOUR[:, :, :] // (number + 1)))
            (tmp_path / "images" / name / f"{number}.png").write_bytes(data[:300] if number == broken else data)
    from fullshard.families.diffusion.sources.image_folder import ImageFolder

    source = ImageFolder(path=tmp_path / "images")
    with pytest.raises(DataError) as caught:
        run(source, tmp_path / "cache", Images())
    first = tmp_path / "images" / "cats" / "1.png"
    assert str(caught.value).startswith(f"{first}: the file {first} of 'path' cannot be read: ")
    prepared = run(source, tmp_path / "cache", Images(unreadable="skip"))
    counts = prepared.train_from.store.counts
    assert (counts.records, counts.samples, counts.drop_reasons[UNREADABLE.reason]) == (6, 4, 2)
    assert "data: 2 samples were dropped; 2 with an image that cannot be read" in prepared.report
    assert [int(sample["label"][0]) for sample in prepared.train] == [0, 0, 1, 1]  # type: ignore[attr-defined]
    for path in (tmp_path / "images").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"no sample is left of 6 records.* relative paths start at data.encode.root"):
        run(source, tmp_path / "cache", Images(unreadable="skip"))
    # A mistake in the record itself is not about the image.
    with pytest.raises(DataError, match="must be the number of a class"):
        Images(unreadable="skip").open(None, length=1).encode({"image": COLOUR, "label": "cat"})


def test_damaged_latents_and_bytes(tmp_path: Path) -> None:
    latents(tmp_path, 1)
    path = tmp_path / "0.npy"
    path.write_bytes(path.read_bytes()[:-8])
    assert "cannot be read: EOF: reading array data, expected 96 bytes got 88. Fix" in fault({"path": str(path)})
    np.save(path, np.array([{}]), allow_pickle=True)
    assert "cannot be read: Object arrays cannot be loaded" in fault({"path": str(path)})
    assert fault({"image": b"no image"}).startswith("the bytes of 'image' cannot be read: unknown image format")
    assert fault({"image": [[1, 2], [3]]}).startswith(
        "the array of 'image' cannot be read: its rows are not equally long"
    )


def test_latents_that_are_not_finite(tmp_path: Path) -> None:
    (values,) = latents(tmp_path, 1, dtype=np.float64)
    for wrong, words in (([np.nan], "1 of them is"), ([np.inf, -np.inf], "2 of them are"), ([1e300], "1 of them is")):
        broken = values.copy()
        broken.flat[: len(wrong)] = wrong
        np.save(tmp_path / "0.npy", broken)
        assert fault({"path": str(tmp_path / "0.npy")}) == (
            f"the file {tmp_path}/0.npy of 'path' is a latent of 24 values, and {words} NaN or infinite in float32. "
            "Fix or replace it, or set data.encode.unreadable = skip to leave those records out."
        )


@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 3, 4), (4,), (4, 0, 2), (1, 1, 4, 3, 4), ()])
def test_latents_of_an_invalid_shape(shape: tuple[int, ...]) -> None:
    said = fault({"image": np.zeros(shape)})
    assert said.startswith(f"the array of 'image' holds floats in the shape {shape}, but a latent is (channels, ")


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((3, 8, 8), dtype=np.uint8),
        np.zeros((8, 8, 2), dtype=np.uint8),
        np.zeros((0, 8), dtype=np.uint8),
        np.zeros((8, 8), dtype=bool),
        np.zeros((4, 8, 8), dtype=np.complex64),
        np.full((8, 8), "a"),
    ],
)
def test_arrays_that_are_not_images(values: np.ndarray) -> None:
    said = fault({"image": values})
    assert said.startswith(f"the array of 'image' holds {values.dtype} in the shape {values.shape}, but an image in an")


def test_pixels_out_of_range_or_too_deep() -> None:
    said = fault({"image": [[0, 256], [-1, 0]]})
    assert said.startswith("the array of 'image' goes from -1 to 256, but pixels go from 0 to 255.")
    deep = Image.fromarray(np.full((4, 4), 40_000, dtype=np.uint16))
    for image, mode in ((deep, "I;16"), (deep.convert("I"), "I"), (Image.new("F", (4, 4)), "F")):
        assert f"the image of 'image' is an image of mode {mode!r}: more than 8 bits" in fault({"image": image})
    assert "of mode 'I;16'" in fault({"image": file_of(deep)})


def test_a_wrong_shape_names_the_record_and_both_shapes(tmp_path: Path) -> None:
    latents(tmp_path, 300, (4, 2, 2))
    np.save(tmp_path / "299.npy", np.zeros((4, 2, 3)))
    train = write_csv(tmp_path / "t.csv", [{"path": f"{at}.npy", "label": 0} for at in range(300)])
    with pytest.raises(DataError) as caught:
        run(train, tmp_path / "cache", Images(root=tmp_path))
    assert str(caught.value) == (
        f"{tmp_path}/t.csv:301: the file {tmp_path}/299.npy of 'path' is a latent of 4 x 2 x 3 (channels x height x "
        "width), but the first sample is a latent of 4 x 2 x 2 (channels x height x width), and all need one shape. "
        "Make all latents in one way, or remove the record."
    )


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (NOISE[:8, :8, 0], "Set data.encode.channels and data.encode.size to make them alike"),
        (NOISE[:, :, 0], "Set data.encode.channels to make them alike"),
        (COLOUR[:8], "Set data.encode.size to make them alike"),
        (
            np.zeros((3, 12, 20)),
            "is a latent of 3 x 12 x 20 (channels x height x width), but the first sample is an image",
        ),
    ],
)
def test_images_of_different_shapes(second: np.ndarray, words: str) -> None:
    with pytest.raises(DataError, match=re.escape(words)):
        Images().open(None, length=1).encode_many([{"image": COLOUR}, {"image": second}])


def test_samples_of_different_shapes_do_not_share_a_batch() -> None:
    samples = [encode({"image": COLOUR}), encode({"image": COLOUR[:8]})]
    with pytest.raises(DataError, match=r"a sample of 3 x 8 x 20 .* with samples of 3 x 12 x 20"):
        ImageCollator(Images()).collate(samples, length=None)


def test_settings_for_images_are_refused_with_latents() -> None:
    record = {"image": np.zeros((4, 2, 2))}
    assert "is a latent, but data.encode.size = 8 is for images" in fault(record, size=8)
    assert "is a latent, but data.encode.channels = 3 is for images" in fault(record, channels=3)
    assert "is a latent, but data.encode.flip = true is for images" in fault(record, flip=True)


@pytest.mark.parametrize("label", ["cat", "", None, True, 1.5, "1.5", [1], "nan", float("inf"), "9" * 5000])
def test_labels_that_are_not_numbers(label: Any) -> None:
    said = fault({"image": COLOUR, "label": label}, classes=10)
    if label in ("", None):
        assert said.startswith("no 'label' in the record, but data.encode.classes = 10 asks for one from 0 to 9.")
    else:
        assert said.startswith(f"'label' must be the number of a class, from 0 to 9, found {problems.found(label)}. ")


@pytest.mark.parametrize(("label", "classes"), [(10, 10), (-1, 10), ("10", 10), (-1, None), (2**63, None)])
def test_labels_outside_the_classes(label: Any, classes: int | None) -> None:
    said = fault({"image": COLOUR, "label": label}, classes=classes)
    allowed = "from 0 to 9, as data.encode.classes = 10 says" if classes else "from 0 on"
    assert said == f"'label' is {label}, but classes go {allowed}. Give the record another label, or remove it."


@pytest.mark.parametrize("label", [9, "9", "9.0", 9.0, np.int32(9), np.float32(9), " 9 "])
def test_labels_as_tables_write_them(label: Any) -> None:
    found = encode({"image": COLOUR, "label": label}, classes=10)["label"]
    assert found.dtype == np.int64
    assert found.tolist() == [9]


def test_a_record_without_an_image() -> None:
    said = fault({"picture": 1, "path": None, "image": ""})
    assert said.startswith("no image or latent in the record. Keys found: 'picture', 'path' (null), 'image'. Accepted")
    assert "Accepted for it: latent_vector_path, path, image." in said
    mapped = fault({"image": COLOUR}, column_mapping={"image": "picture"})
    assert "Accepted for it: picture." in mapped
    assert "'image' must be an image (a path, " in fault({"image": 3})
    said = fault({"image": COLOUR}, column_mapping={"label": "class"})
    assert said.startswith("no 'class' in the record, which data.encode.column_mapping maps to 'label'. Keys found: ")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"column_mapping": {"labels": "class"}}, "'labels' is not a part of an image record (did you mean 'label'?)"),
        ({"column_mapping": {"label": "a", "image": "a"}}, "'a' is mapped to both 'image' and 'label'"),
        ({"scale": 0}, "data.encode.scale = 0"),
        (
            {"scale": "measured"},
            "data.encode.scale = 'measured': it must be a number or measure (did you mean 'measure'?)",
        ),
        ({"mean": True}, "data.encode.mean = true: it must be a number"),
        ({"channels": 4}, "data.encode.channels = 4: it must be one of 1, 3"),
        ({"size": 0}, "data.encode.size = 0"),
        ({"classes": 0}, "data.encode.classes = 0"),
        ({"sise": 8}, "data.encode.sise is not a known key (did you mean 'size'?)"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(words)):
        decode(Encoder, {"kind": "image", **settings}, where="data.encode")


def test_recipes_name_it_in_every_form() -> None:
    found = decode(Encoder, {"kind": "image", "scale": "measure", "mean": "0.5", "size": 32}, where="data.encode")
    assert found == Images(scale="measure", mean=0.5, size=32)
    assert decode(Encoder, "image", where="data.encode") == Images()


# --- batches


def test_pixels_from_minus_one_to_one_then_mean_and_scale() -> None:
    grey = np.array([[0, 255], [51, 204]], dtype=np.uint8)
    plain = batch_of([{"image": grey}], Images())
    assert plain["images"].tolist() == [[[[-1.0, 1.0], pytest.approx([-0.6, 0.6])]]]
    assert plain["images"].dtype == torch.float32
    assert plain["label"].tolist() == [-1]
    scaled = batch_of([{"image": grey}], Images(mean=0.5, scale=2))
    assert scaled["images"].tolist() == [[[[-3.0, 1.0], pytest.approx([-2.2, 0.2])]]]
    latent = np.array([[[4.0]]])
    assert batch_of([{"image": latent}], Images(mean=1, scale=0.5))["images"].tolist() == [[[[1.5]]]]


def test_a_filler_is_a_sample_like_others() -> None:
    collator = ImageCollator(Images())
    sample = encode({"image": COLOUR, "label": 3})
    blank = collator.blank(sample)
    batch = collator.collate([sample, blank], length=None)
    assert batch["images"][0].equal(batch["images"][1])
    assert batch["label"].tolist() == [3, 3]


def test_measured_numbers_make_mean_0_and_deviation_1(tmp_path: Path) -> None:
    values = latents(tmp_path, 40)
    rows = [{"path": str(tmp_path / f"{at}.npy")} for at in range(40)]
    encoder = Images(scale="measure", mean="measure")
    store = store_of(rows, tmp_path / "cache", encoder)
    collator = ImageCollator(encoder, store)
    whole = np.stack(values).astype(np.float64)
    mean, scale = collator.scaling
    assert mean == pytest.approx(whole.mean(), rel=1e-8)
    assert scale == pytest.approx(1 / whole.std(), rel=1e-8)
    images = collator.collate([store[at] for at in range(40)], length=None)["images"].double()
    assert abs(float(images.mean())) < 1e-6
    assert float(images.std(correction=0)) == pytest.approx(1, abs=1e-6)
    # The report shows the numbers in use, which are the same for a store found on disk and for a pickled collator.
    (told,) = [line for line in collator.notes if line.startswith("scaling")]
    assert told == f"scaling: mean = {mean!r}, scale = {scale!r} (measured over 40 samples of data.train)"
    other = ImageCollator(Images(scale="measure", mean="measure"), Store(store.folder))
    assert other.scaling == pickle.loads(pickle.dumps(collator)).scaling == (mean, scale)
    by_hand = ImageCollator(Images(mean=mean, scale=scale))
    assert by_hand.collate([store[3]], length=None)["images"].equal(collator.collate([store[3]], length=None)["images"])


def test_one_of_the_two_numbers_can_be_measured(tmp_path: Path) -> None:
    # As -1 and 1: of mean 0.5 and variance 0.75.
    rows = [{"image": [[255, 255], [255, 0]]}]
    for settings, expected in (
        ({"scale": "measure"}, (0.0, 0.75**-0.5)),
        ({"mean": "measure", "scale": 2.0}, (0.5, 2.0)),
        ({"mean": "measure", "scale": "measure"}, (0.5, 0.75**-0.5)),
    ):
        encoder = Images(**settings)
        collator = ImageCollator(encoder, store_of(rows, tmp_path, encoder))
        assert collator.scaling == pytest.approx(expected, rel=1e-8)
        assert collator.notes[0] == "images: 1 x 2 x 2, pixels from -1 to 1"


def test_values_without_a_spread(tmp_path: Path) -> None:
    encoder = Images(scale="measure")
    store = store_of([{"image": [[[2.5, 2.5]]]}] * 3, tmp_path, encoder)
    with pytest.raises(DataError, match=r"data\.encode\.scale = measure: all values of data\.train are 2\.5, so there"):
        ImageCollator(encoder, store)
    settings = Images(mean="measure")
    centred = ImageCollator(settings, store_of([{"image": [[[2.5, 2.5]]]}], tmp_path, settings))
    assert centred.scaling == (2.5, 1.0)
    assert centred.notes[0] == "latents: 1 x 1 x 2, as they are"


def test_other_data_is_held_to_the_shape_of_the_training_data(tmp_path: Path) -> None:
    first = Images()
    store = store_of([{"image": COLOUR}], tmp_path, first)
    later = Images().open(None, length=1)
    collator = later.collator(store)
    with pytest.raises(
        DataError, match=r"is an image of 3 x 8 x 20 .*, but the first sample is an image of 3 x 12 x 20"
    ):
        later.encode({"image": COLOUR[:8]})
    with pytest.raises(DataError, match=r"a sample of 3 x 8 x 20"):
        collator.collate([encode({"image": COLOUR[:8]})], length=None)


def test_the_fingerprint_of_files_outside_follows_them(tmp_path: Path) -> None:
    latents(tmp_path, 3)

    def now(rows: list[dict[str, Any]], **settings: Any) -> str:
        return Images(**settings).open(None, length=1).external_fingerprint(Listed(rows, where=str, fingerprint=str))

    rows = [{"latent_vector_path": f"{at}.npy"} for at in range(3)]
    first = now(rows, root=tmp_path)
    assert first == now(rows, root=tmp_path)
    assert first != now(rows)
    assert first != now(rows[:2], root=tmp_path)
    np.save(tmp_path / "2.npy", np.zeros((4, 2, 3), dtype=np.float32))
    assert first != now(rows, root=tmp_path)
    dictionary = [{"image": {"bytes": None, "path": str(tmp_path / "0.npy")}}]
    assert now(dictionary) == now([{"path": str(tmp_path / "0.npy")}]) != ""
    assert now([{"image": COLOUR}]) == now([{"image": b"x"}]) == now([{"image": 3}]) == now([{}]) == ""


# --- flips


def images_of(count: int) -> tuple[ImageCollator, dict[str, Any], np.ndarray]:
    encoder = Images(flip=True)
    batch = batch_of([{"image": np.resize(NOISE + at % 256, (3, 4)), "label": at} for at in range(count)], encoder)
    return ImageCollator(encoder), batch, np.random.default_rng(1).integers(-(2**63), 2**63, count)


def test_half_of_the_images_are_flipped_by_their_draws() -> None:
    collator, batch, draws = images_of(400)
    before = batch["images"].clone()
    found = collator.augment(batch, draws)
    assert batch["images"].equal(before)
    assert found["label"].equal(batch["label"])
    flipped = [bool(image.equal(old.flip(-1))) for image, old in zip(found["images"], before, strict=True)]
    assert all(flip or image.equal(old) for flip, image, old in zip(flipped, found["images"], before, strict=True))
    assert 150 < sum(flipped) < 250
    # Another epoch has other draws.
    assert not collator.augment(batch, draws + 1)["images"].equal(found["images"])


def test_flips_do_not_depend_on_the_split_or_the_order() -> None:
    collator, batch, draws = images_of(12)
    whole = collator.augment(batch, draws)["images"]
    assert not whole.equal(batch["images"])
    for places in (np.arange(0, 5), np.arange(5, 12), np.array([11, 3, 0])):
        part = {key: value[places] for key, value in batch.items()}
        assert collator.augment(part, draws[places])["images"].equal(whole[places])


def test_nothing_is_flipped_unless_asked_for() -> None:
    _, batch, draws = images_of(12)
    assert ImageCollator(Images()).augment(batch, draws) is batch


def test_batches_made_by_worker_processes_are_the_same(tmp_path: Path) -> None:
    encoder = Images(scale="measure")
    store = store_of([{"image": np.resize(NOISE + at, (3, 4))} for at in range(4)], tmp_path, encoder)
    samples, collator = [store[at] for at in range(4)], ImageCollator(encoder, store)
    here, there = (list(Loader(samples, collator, per_device=2, workers=workers).once()) for workers in (0, 1))
    assert len(here) == len(there) == 2
    assert all(a["images"].equal(b["images"]) for a, b in zip(here, there, strict=True))


# --- through prepare


def test_measured_over_the_training_data_and_used_for_validation(tmp_path: Path) -> None:
    values = latents(tmp_path / "train", 20)
    latents(tmp_path / "val", 3)
    train = write_csv(tmp_path / "t.csv", [{"path": str(tmp_path / f"train/{at}.npy")} for at in range(20)])
    held = write_csv(tmp_path / "v.csv", [{"path": str(tmp_path / f"val/{at}.npy")} for at in range(3)])
    for _ in range(2):  # the second time with all of it on disk
        data = run(train, tmp_path / "cache", Images(mean="measure", scale="measure"), validation=held)
        whole = np.stack(values).astype(np.float64)
        mean, scale = data.collator.scaling  # type: ignore[attr-defined]
        assert (mean, scale) == pytest.approx((whole.mean(), 1 / whole.std()), rel=1e-8)
        told = f"scaling: mean = {mean!r}, scale = {scale!r} (measured over 20 samples of data.train)"
        assert data.report[1:3] == ["latents: 4 x 2 x 3, as they are", told]
        (batch,) = Loader(data.validation, data.collator, per_device=3).once()
        assert np.allclose(batch["images"].numpy(), (np.stack(values[:3]) - mean) * scale, atol=1e-5)


def test_rewritten_latents_are_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "a.npy", np.full((1, 2, 2), len(name) + ord(name[0]), dtype=np.float32))
        write_csv(tmp_path / name / "t.csv", [{"path": "a.npy", "label": 0}])

    def first() -> float:
        data = run(Files(path="t.csv"), tmp_path / "cache", Images())
        return float(data.collator.collate([data.train[0]], length=None)["images"][0, 0, 0, 0])

    # The same table in two folders names two files.
    for name in ("one", "two"):
        monkeypatch.chdir(tmp_path / name)
        assert first() == len(name) + ord(name[0])
    np.save("a.npy", np.full((1, 2, 2), 5, dtype=np.float32))
    assert first() == 5
    stores = len(list((tmp_path / "cache").glob("*.lock")))
    assert first() == 5
    assert stores == len(list((tmp_path / "cache").glob("*.lock"))) == 3


def test_validation_data_of_another_shape(tmp_path: Path) -> None:
    for name, size in (("train", 4), ("val", 5)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"image": np.zeros((size, 4), dtype=int).tolist()}))
    held = Files(path=str(tmp_path / "val.jsonl"))
    train = Files(path=str(tmp_path / "train.jsonl"))
    words = r"val\.jsonl:1: the array of 'image' is an image of 1 x 5 x 4 .* the first sample is an image of 1 x 4 x 4"
    run(train, tmp_path / "cache", Images())
    with pytest.raises(DataError, match=words):
        run(train, tmp_path / "cache", Images(), validation=held)


def test_a_change_of_code_that_is_imported_whole_is_another_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fullshard.data.store import store_key
    from fullshard.families.diffusion import captions

    records = Listed([{"image": COLOUR}], where=str, fingerprint=lambda: "one")
    before = store_key(records, Images().open(None, length=1))
    changed = tmp_path / "captions.py"
    changed.write_text(Path(captions.__file__).read_text() + "# other\n")
    monkeypatch.setattr(captions, "__file__", str(changed))
    assert store_key(records, Images().open(None, length=1)) != before
