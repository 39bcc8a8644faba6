"""Images in pairs: tokens, grids and pixels against Transformers' own processor; columns, modes, errors and batches."""

from __future__ import annotations

import copy
import json
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fullshard.config.part import plain
from fullshard.contracts.data import Features, Source
from fullshard.data.loader import Loader
from fullshard.data.prepare import Prepared, choose_encoder, prepare
from fullshard.data.sources.files import Files
from fullshard.errors import DataError, RecipeError
from fullshard.families.embedding.encoders.pairs import PairCollator, Pairs, Prompts
from fullshard.images.reading import UNREADABLE
from fullshard.multimodal.pair_processor import Vision, load_vision
from tests.families.embedding.vision import own_processor, tokenizer, vision_folder

LONG = 10_000
PAD = 5
FEATURES = {
    "tokens": np.int32,
    "lengths": np.int32,
    "label": np.float64,
    "images": np.int32,
    "image_sizes": np.int64,
    "image_files": np.bool_,
    "image_data": np.uint8,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_folder(tmp_path_factory.mktemp("model"), weights=False)


@pytest.fixture
def vision(folder: Path) -> Vision:
    return load_vision(tokenizer(), folder, trust_remote_code=False, where="model")


@pytest.fixture(scope="module")
def own(folder: Path) -> Any:
    return own_processor(folder)


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images: of one to four tokens each, in many formats."""
    place = tmp_path_factory.mktemp("shots")
    noise = np.random.default_rng(0).integers(0, 255, (90, 120, 4), dtype=np.uint8)
    wide, small = Image.fromarray(noise[:40, :90, :3]), Image.fromarray(noise[:20, :20, :3])
    wide.save(place / "wide.png")
    Image.fromarray(noise[:40, :90, 1:].copy()).save(place / "other.png")
    small.save(place / "small.png")
    Image.fromarray(noise).save(place / "clear.png")
    wide.convert("L").save(place / "grey.jpg")
    wide.convert("CMYK").save(place / "ink.tiff")
    turned = Image.Exif()
    turned[0x0112] = 6
    wide.save(place / "turned.jpg", exif=turned, quality=95)
    table = wide.convert("P")
    table.save(place / "table.png", transparency=bytes(range(256)))
    (place / "cut.png").write_bytes((place / "wide.png").read_bytes()[:3000])
    (place / "cut.jpg").write_bytes((place / "grey.jpg").read_bytes()[:700])
    (place / "text.png").write_text("no image")
    Image.new("1", (1, 900)).save(place / "thread.png")
    return place


def one(record: dict[str, Any], vision: Any, *, length: int = LONG, **settings: Any) -> Features:
    samples = Pairs(**settings).open(vision, length=length).encode(record).samples
    assert len(samples) == 1
    return samples[0]


def split(features: Features) -> list[list[int]]:
    """The texts of a sample."""
    return [piece.tolist() for piece in np.split(features["tokens"], np.cumsum(features["lengths"])[:-1])]


def batch_of(records: list[dict[str, Any]], vision: Any, **settings: Any) -> dict[str, Any]:
    encoder = Pairs(**settings)
    samples = [encoder.open(vision, length=LONG).encode(record).samples[0] for record in records]
    return PairCollator(encoder, vision).collate(samples, length=None)


def theirs(own: Any, *, text: str | None = None, image: Any = None, prompt: str = "") -> dict[str, Any]:
    """One input by Transformers' own processor."""
    content = [{"type": "image", "image": image}] if image is not None else []
    content += [{"type": "text", "text": text}] if text is not None else []
    system = [{"role": "system", "content": [{"type": "text", "text": prompt}]}] if prompt else []
    messages = [*system, {"role": "user", "content": content}]
    return dict(own.apply_chat_template([messages], tokenize=True, return_dict=True, return_tensors="pt"))


def fault(record: dict[str, Any], vision: Any, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        one(record, vision, **settings)
    return str(caught.value)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Files:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Files(path=str(path))


def run(train: Source, cache: Path, processor: Any, **settings: Any) -> Prepared:
    encode = Pairs(**settings)
    rest: dict[str, Any] = {"validation": None, "length": 64, "pack": True, "holdout": 0.0, "seed": 0}
    return prepare(train=train.open(), encode=encode, processor=processor, cache=cache, say=lambda line: None, **rest)


# --- against Transformers


@pytest.mark.parametrize("prompt", ["", "Find the picture"])
def test_inputs_equal_those_of_transformers(vision: Vision, own: Any, shots: Path, prompt: str) -> None:
    wide, small = str(shots / "wide.png"), str(shots / "small.png")
    record = {"query": "a red/blue ünïcode thing", "query_image": wide, "positive_image": small, "negatives": ["no\n"]}
    used = Prompts(query=prompt, document=prompt)
    expected = [
        theirs(own, text="a red/blue ünïcode thing", image=wide, prompt=prompt),
        theirs(own, image=small, prompt=prompt),
        theirs(own, text="no\n", prompt=prompt),
    ]
    sample = one(record, vision, prompts=used)
    assert split(sample) == [found["input_ids"][0].tolist() for found in expected]
    assert [text.count(PAD) for text in split(sample)] == [3, 1, 0]
    assert sample["images"].tolist() == [1, 1, 0]
    batch = batch_of([record], vision, prompts=used)
    assert batch["images"].tolist() == [1, 1, 0]
    assert batch["grids"].tolist() == [found["image_grid_thw"][0].tolist() for found in expected[:2]]
    assert all(ours.equal(found["pixel_values"]) for ours, found in zip(batch["pixels"], expected[:2], strict=True))


@pytest.mark.parametrize("name", ["clear.png", "grey.jpg", "ink.tiff", "turned.jpg", "table.png"])
def test_every_kind_of_image_is_loaded_as_transformers_does(vision: Vision, own: Any, shots: Path, name: str) -> None:
    with pytest.warns(UserWarning, match="Transparency") if name == "table.png" else nullcontext():
        expected = theirs(own, image=str(shots / name))
    record = {"query": "a", "positive_image": name}
    batch = batch_of([record], vision, image_root=shots)
    assert split(one(record, vision, image_root=shots))[1] == expected["input_ids"][0].tolist()
    assert batch["grids"].tolist() == expected["image_grid_thw"].tolist()
    assert batch["pixels"][0].equal(expected["pixel_values"])
    assert batch["pixels"][0].dtype == torch.float32


def test_a_rotated_image_is_rotated_by_its_exif_tag(vision: Vision, shots: Path) -> None:
    batch = batch_of([{"query_image": "wide.png", "positive_image": "turned.jpg"}], vision, image_root=shots)
    assert batch["grids"].tolist() == [[1, 2, 6], [1, 6, 2]]


@pytest.mark.parametrize("starts", [False, True])
def test_special_tokens_are_added_where_transformers_adds_them(vision: Vision, own: Any, starts: bool) -> None:
    from tokenizers import processors

    ending = copy.deepcopy(tokenizer())
    special = [("<|endoftext|>", 0)]
    ending.backend_tokenizer.post_processor = processors.TemplateProcessing("$A <|endoftext|>", None, special)
    if starts:
        ending.bos_token = "<|im_start|>"
    other, reference = copy.deepcopy(vision), copy.deepcopy(own)
    other.tokenizer = reference.tokenizer = ending
    expected = theirs(reference, text="fox")["input_ids"][0].tolist()
    assert (expected[-1] == 0) is not starts
    record = {"query": "fox", "positive": "a long, long text"}
    assert split(one(record, other))[0] == expected
    # What stands at the end stays there.
    assert split(one(record, other, length=24))[1][-2:] == expected[-2:]


# --- the forms of an image


def test_all_forms_of_an_image_are_one(vision: Vision, shots: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (shots / "turned.jpg").read_bytes()
    forms: list[tuple[Any, dict[str, Any]]] = [
        (str(shots / "turned.jpg"), {}),
        ("turned.jpg", {"image_root": shots}),
        (str(shots / "turned.jpg"), {"image_root": Path("/nowhere")}),
        (data, {}),
        (bytearray(data), {}),
        ({"bytes": data, "path": "gone.jpg"}, {}),
        ({"bytes": None, "path": "turned.jpg"}, {"image_root": shots}),
        ({"path": str(shots / "turned.jpg")}, {}),
        (Image.open(shots / "turned.jpg"), {}),
    ]
    batches = [batch_of([{"query": "a", "positive_image": value}], vision, **settings) for value, settings in forms]
    for batch in batches[1:]:
        assert batch["tokens"].equal(batches[0]["tokens"])
        assert batch["pixels"][0].equal(batches[0]["pixels"][0])
    # The same image is the same document, wherever it is stored.
    assert len({batch["keys"][1].item() for batch in batches[:-1]}) == 1
    monkeypatch.chdir(shots)
    here = one({"query": "a", "positive_image": "turned.jpg"}, vision)
    assert here["image_files"].tolist() == [True]
    assert here["image_data"].tobytes() == b"turned.jpg"
    kept = one({"query_image": data, "positive_image": "turned.jpg"}, vision)
    assert kept["image_files"].tolist() == [False, True]
    assert kept["image_sizes"].tolist() == [len(data), 10]
    assert kept["image_data"].tobytes() == data + b"turned.jpg"


def rows(shots: Path) -> list[dict[str, Any]]:
    return [
        {"query": "a", "positive_image": str(shots / "wide.png"), "negative_images": [str(shots / "small.png")]},
        {"query": "b", "positive_image": str(shots / "grey.jpg"), "negative_images": []},
    ]


def packed(path: str) -> dict[str, Any]:
    return {"bytes": Path(path).read_bytes(), "path": None}


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "parquet bytes", "data set"])
def test_every_source_gives_the_same_batches(vision: Vision, shots: Path, tmp_path: Path, form: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = rows(shots)
    if form in ("parquet bytes", "data set"):
        for record in records:
            record["positive_image"] = packed(record["positive_image"])
            record["negative_images"] = [packed(path) for path in record["negative_images"]]
    source = Files(path=str(tmp_path / "data"))
    if form == "jsonl":
        source = write_lines(tmp_path / "a.jsonl", records)
    elif form == "csv":
        cells = [[r["query"], r["positive_image"], *(r["negative_images"] or [""])] for r in records]
        lines = ["query,positive_image,negative_image_1", *(",".join(row) for row in cells)]
        (tmp_path / "a.csv").write_text("\n".join(lines))
        source = Files(path=str(tmp_path / "a.csv"))
    elif form == "data set":
        from datasets import Dataset, Features, List, Value
        from datasets import Image as Picture

        kinds = Features({"query": Value("string"), "positive_image": Picture(), "negative_images": List(Picture())})
        Dataset.from_list(records, features=kinds).save_to_disk(tmp_path / "data")
    else:
        pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
        source = Files(path=str(tmp_path / "a.parquet"))
    prepared = run(source, tmp_path / "cache", vision)
    assert prepared.report[2 if form != "csv" else 3] == "mode: t2i (query text, positive image)"
    batch = prepared.collator.collate([prepared.train[0], prepared.train[1]], length=None)
    expected = batch_of(rows(shots), vision)
    assert batch["tokens"].equal(expected["tokens"])
    assert batch["texts"].tolist() == [3, 2]
    assert batch["images"].tolist() == [0, 1, 1, 0, 1]
    assert all(a.equal(b) for a, b in zip(batch["pixels"], expected["pixels"], strict=True))


# --- columns and modes


def kinds(record: dict[str, Any], **settings: Any) -> str:
    return Pairs(**settings).columns_read(record)[-1].partition(" (")[0]


@pytest.mark.parametrize(
    ("record", "mode"),
    [
        ({"query": "a", "positive": "b"}, "t2t"),
        ({"query": "a", "positive_image": "b.png"}, "t2i"),
        ({"caption": "a", "image": "b.png"}, "t2i"),
        ({"text": "a", "image": "b.png"}, "t2i"),
        ({"query_image": "a.png", "positive": "b"}, "i2t"),
        ({"source_image": "a.png", "answer": "b"}, "i2t"),
        ({"query_image": "a.png", "positive_image": b"b"}, "i2i"),
        ({"source_image": "a.png", "image": "b.png"}, "i2i"),
        ({"query": "a", "query_image": "a.png", "positive": "b"}, "m2t"),
        ({"query": "a", "source_image": "a.png", "positive": "b"}, "m2t"),
        ({"query": "a", "query_image": "a.png", "image": "b.png"}, "m2i"),
        ({"query": "a", "positive": "b", "positive_image": "b.png"}, "t2m"),
        # In a table, an empty cell means no image.
        ({"query": "", "query_image": "a.png", "positive": None, "positive_image": "b.png"}, "i2i"),
        ({"query": "a", "query_image": "", "positive": "b", "positive_image": None}, "t2t"),
        ({"query": "a", "query_image": {"bytes": None, "path": None}, "positive": "b"}, "t2t"),
    ],
)
def test_columns_decide_what_a_record_holds(record: dict[str, Any], mode: str) -> None:
    told = Pairs().columns_read(record)
    if mode == "t2t":
        assert told == []
    else:
        words = {"t": "text", "i": "image", "m": "text and image"}
        assert told[-1] == f"mode: {mode} (query {words[mode[0]]}, positive {words[mode[2]]})"
    if "m" not in mode[2:]:
        assert Pairs(mode=mode).read(record).mode == mode  # type: ignore[arg-type]
        other = "i2t" if mode != "i2t" else "t2t"
        with pytest.raises(DataError, match=rf"^the record is {mode} \(query .*mode = {other} requires "):
            Pairs(mode=other).read(record)  # type: ignore[arg-type]


def test_all_six_modes_become_samples(vision: Vision, shots: Path) -> None:
    text, image = {"t": "a", "i": None, "m": "a"}, {"t": None, "i": "wide.png", "m": "small.png"}
    for mode in ("t2t", "t2i", "i2t", "i2i", "m2t", "m2i"):
        query, positive = mode.split("2")
        record = {
            "query": text[query],
            "query_image": image[query],
            "positive": text[positive],
            "positive_image": image[positive],
        }
        sample = one(record, vision, image_root=shots, mode=mode)
        assert sample["images"].tolist() == [query != "t", positive != "t"]
        tokens = {"t": 0, "i": 3, "m": 1}
        assert [piece.count(PAD) for piece in split(sample)] == [tokens[query], tokens[positive]]


def test_a_mode_holds_every_part_of_a_record_to_it() -> None:
    def refusal(record: dict[str, Any]) -> str:
        with pytest.raises(DataError) as caught:
            Pairs(mode="t2i").texts(record)
        return str(caught.value)

    message = refusal({"caption": "red cat", "positive": "cat_red.jpg"})
    assert message.startswith("the record is t2t (query text, positive text) and its positive is text, but data.enc")
    assert message.endswith(
        "mode = t2i requires image there. Where 'positive' holds images, set data.encode.column_mapping = "
        "{positive_image: positive}."
    )
    pair = {"query": "red cat", "positive_image": "cat_red.jpg"}
    assert "{negative_images: negatives}" in refusal({**pair, "negatives": ["dog.jpg"]})
    assert "its query is text and image, but" in refusal({**pair, "query_image": "a.jpg"})
    assert "set it to null" in refusal({**pair, "query_image": "a.jpg"})


def test_a_mapping_says_that_a_column_holds_images(vision: Vision, shots: Path) -> None:
    record = {"query": "red cat", "positive": "wide.png", "negatives": ["small.png"], "image": "gone.png"}
    assert Pairs().texts(record) == ["red cat", "wide.png", "small.png"]
    assert Pairs().columns_read(record) == [
        "columns: 'image' is not read; data.encode.column_mapping = {positive_image: image} would take it"
    ]
    mapping = {"positive_image": "positive", "negative_images": "negatives"}
    assert Pairs(column_mapping=mapping).texts(record) == ["red cat"]
    assert kinds(record, column_mapping=mapping) == "mode: t2i"
    sample = one(record, vision, column_mapping=mapping, image_root=shots, mode="t2i")
    assert sample["images"].tolist() == [0, 1, 1]
    assert sample["image_data"].tobytes() == b"wide.pngsmall.png"
    assert kinds(
        {"image": "a.png", "caption": "b"}, column_mapping={"query_image": "image", "positive": "caption"}
    ) == ("mode: i2t")
    with pytest.raises(DataError, match=r"^no 'shot' in the record, which .* maps to 'query_image'\. .* a null there"):
        Pairs(column_mapping={"query_image": "shot"}).texts({"query": "a", "positive": "b"})


def test_negatives_are_texts_first_then_images(vision: Vision, shots: Path) -> None:
    pair = {"query": "a", "positive": "b"}
    record = {**pair, "negative_images": ["wide.png", "small.png"], "negatives": ["x", "y"]}
    assert one(record, vision, image_root=shots)["images"].tolist() == [0, 0, 0, 0, 1, 1]
    assert one(record, vision, image_root=shots, negatives=3)["image_data"].tobytes() == b"wide.png"
    numbered = {**pair, "negative_image_10": "small.png", "negative_image_2": "wide.png", "negative_image_1": ""}
    assert one(numbered, vision, image_root=shots)["image_data"].tobytes() == b"wide.pngsmall.png"
    single = {**pair, "negative_images": packed(str(shots / "wide.png"))}
    assert one(single, vision)["images"].tolist() == [0, 0, 1]
    assert one({**pair, "negative_image": "wide.png"}, vision, image_root=shots)["images"].tolist() == [0, 0, 1]
    for nothing in (None, [], "", {"bytes": None, "path": None}):
        assert one({**pair, "negative_images": nothing}, vision)["images"].tolist() == [0, 0]


def test_values_that_are_not_images(vision: Vision) -> None:
    pair = {"query": "a", "positive": "b"}
    form = "must be an image (a path, the bytes of a file, or {bytes: ..., path: ...}), found"
    for value in (3, ["a.png"], {"url": "x"}, {"bytes": 3}, " "):
        assert fault({**pair, "query_image": value}, vision).startswith(f"'query_image' {form} ")
    assert fault({**pair, "negative_images": ["a.png", 3]}, vision).startswith(f"'negative_images[1]' {form} 3.")
    assert fault({**pair, "negative_images": [None]}, vision).startswith("'negative_images[0]' is null or blank")
    written = fault({**pair, "negative_images": '["a.png", "b.png"]'}, vision)
    assert "found a text that spells out a list" in written
    assert "negative_image_1, negative_image_2." in written
    both = {"query": "a", "negative_image_1": "b", "query_image": None}
    missing = fault(both, vision)
    assert missing.startswith("no 'positive' in the record.")
    assert "As an image: positive_image, image. For another" in missing
    # A wrong type is an error even if the record would be skipped for its images.
    assert fault({**pair, "query_image": 3}, vision, unreadable="skip").startswith("'query_image' must be an image")


def test_pairs_with_images_are_chosen_and_texts_stay_texts() -> None:
    assert isinstance(choose_encoder({"query_image": "a.png", "positive": "b"}), Pairs)
    assert isinstance(choose_encoder({"anchor": "a", "positive_image": "b.png"}), Pairs)
    record = {"query": "a/b.png", "query_image": "a.png", "positive_image": "b.png", "negatives": ["/tmp/c.jpg"]}
    assert Pairs().texts(record) == ["a/b.png", "/tmp/c.jpg"]


def test_mining_reads_texts_alone() -> None:
    with pytest.raises(DataError, match=r"^'positive_image' in the record asks for images; only texts are read here"):
        Pairs().pair({"query": "a", "positive_image": "b.png"})
    for record in (
        {"positive_image": "b.png", "text": "a"},
        {"image": "b.png"},
        {"positive": "a", "positive_image": b"x"},
    ):
        with pytest.raises(DataError, match=r"asks for an image, but a document is a text here"):
            Pairs().document(record)
    assert Pairs().document({"text": "a", "image": "b.png", "positive_image": None}) == "a"


# --- images that cannot be read


def test_an_image_that_cannot_be_read_is_named_with_the_reason(vision: Vision, shots: Path) -> None:
    def reason(value: Any, **settings: Any) -> str:
        return fault({"query": "a", "positive_image": value}, vision, **settings)

    fix = "Fix or replace it, or set data.encode.unreadable = skip to leave those records out."
    for name, why in (
        ("cut.png", "image file is truncated"),
        ("cut.jpg", "image file is truncated"),
        ("text.png", "unknown image format."),
        ("thread.png", "absolute aspect ratio must be smaller than 200"),
    ):
        message = reason(str(shots / name))
        assert message.startswith(f"the image {shots / name} of 'positive_image' cannot be read: {why}")
        assert message.endswith(fix)
        data = (shots / name).read_bytes()
        assert reason(data).startswith(f"the bytes of 'positive_image' cannot be read as an image: {why}")
    assert "Is a directory" in reason(str(shots))
    assert "unknown image format" in reason(b"")
    gone = reason("gone.png", image_root=shots)
    assert gone.startswith(f"the image {shots}/gone.png of 'positive_image' cannot be read: No such file")
    assert f"Relative paths are taken from {shots}: see data.encode.image_root." in gone
    assert f"Relative paths are taken from {Path.cwd()}: see" in reason("gone.png")
    assert "Relative paths" not in reason("/gone.png")
    assert reason("gone\0.png").count("embedded null byte") == 1
    late = fault({"query": "a", "positive": "b", "negative_images": ["wide.png", "cut.png"]}, vision, image_root=shots)
    assert f"{shots}/cut.png of 'negative_images[1]'" in late


def test_a_decompression_bomb_is_an_image_that_cannot_be_read(
    vision: Vision, shots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {"query": "a", "positive_image": str(shots / "wide.png")}
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3000)
    # Larger than what the library warns of, and not twice as large: read without a word.
    assert batch_of([record], vision)["grids"].tolist() == [[1, 2, 6]]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1500)
    assert "decompression bomb" in fault(record, vision)


def test_records_with_unreadable_images_are_counted_when_skipped(vision: Vision, shots: Path, tmp_path: Path) -> None:
    names = ["wide.png", "cut.png", "small.png", "gone.png", "grey.jpg"]
    source = write_lines(
        tmp_path / "a.jsonl",
        [{"query": f"number {at}", "positive_image": name} for at, name in enumerate(names)]
        + [{"query": "last", "positive_image": "wide.png", "negative_images": ["small.png", "text.png"]}],
    )
    with pytest.raises(DataError, match=r"a\.jsonl:2: the image .*/cut\.png of 'positive_image' cannot be read: im"):
        run(source, tmp_path / "cache", vision, image_root=shots)
    prepared = run(source, tmp_path / "cache", vision, image_root=shots, unreadable="skip")
    counts = prepared.train_from.store.counts
    assert (counts.records, counts.samples, counts.drop_reasons[UNREADABLE.reason], counts.dropped) == (6, 3, 3, 3)
    assert "data: 3 samples were dropped; 3 with an image that cannot be read" in prepared.report
    assert prepared.train_from.store.records.tolist() == [0, 2, 4]
    none = write_lines(tmp_path / "b.jsonl", [{"query": "a", "positive_image": "wide.png"}])
    with pytest.raises(DataError, match=r"^data\.train: no sample .* 1 with an image that .* fix .*image_root"):
        run(none, tmp_path / "cache", vision, image_root=tmp_path, unreadable="skip")


def test_a_damaged_image_of_a_saved_data_set_is_named_by_its_record(
    vision: Vision, shots: Path, tmp_path: Path
) -> None:
    from datasets import Dataset, Features, Value
    from datasets import Image as Picture

    images = [packed(str(shots / name)) for name in ("wide.png", "cut.png")]
    kinds = Features({"query": Value("string"), "positive_image": Picture()})
    Dataset.from_dict({"query": ["a", "b"], "positive_image": images}, features=kinds).save_to_disk(tmp_path / "data")
    source = Files(path=str(tmp_path / "data"))
    with pytest.raises(DataError, match=r"record 2: the bytes of 'positive_image' cannot be read as an image"):
        run(source, tmp_path / "cache", vision)
    assert len(run(source, tmp_path / "cache", vision, unreadable="skip").train) == 1


def test_images_that_vanish_or_change_stop_the_run_and_are_named(vision: Vision, shots: Path, tmp_path: Path) -> None:
    place = tmp_path / "shot.png"
    encoder = Pairs(image_root=tmp_path)

    def after(data: bytes | None) -> str:
        place.write_bytes((shots / "wide.png").read_bytes())
        sample = encoder.open(vision, length=LONG).encode({"query": "a", "positive_image": "shot.png"}).samples[0]
        place.unlink()
        if data is not None:
            place.write_bytes(data)
        with pytest.raises(DataError) as caught:
            PairCollator(encoder, vision).collate([sample], length=None)
        assert "the folder of data.cache" in str(caught.value)
        return str(caught.value)

    assert after(None).startswith(f"the image {place} cannot be read any more: No such file or directory. It was")
    changed = after((shots / "small.png").read_bytes())
    assert changed.startswith(f"the image {place} has changed since it was encoded: it takes 1 tokens now, 3 then.")
    assert "image file is truncated" in after((shots / "cut.png").read_bytes())


# --- tokens that do not fit


def test_a_text_is_cut_at_its_end_and_the_template_stays(vision: Vision, own: Any, shots: Path) -> None:
    text = "one two three four five six"
    record = {"query": text, "query_image": str(shots / "wide.png"), "positive": "short"}
    whole = split(one(record, vision))[0]
    assert whole == theirs(own, text=text, image=str(shots / "wide.png"))["input_ids"][0].tolist()
    sample = one(record, vision, length=len(whole) - 4)
    assert split(sample)[0] == theirs(own, text=text[:-4], image=str(shots / "wide.png"))["input_ids"][0].tolist()
    assert Pairs().open(vision, length=len(whole) - 4).encode(record).truncated
    assert not Pairs().open(vision, length=len(whole)).encode(record).truncated
    # With a prompt, and without an image.
    prompted = Prompts(query="Find it")
    plain_text = {"query": text, "positive": "s"}
    whole = split(one(plain_text, vision, prompts=prompted))[0]
    sample = one(plain_text, vision, prompts=prompted, length=len(whole) - 9)
    assert split(sample)[0] == theirs(own, text=text[:-9], prompt="Find it")["input_ids"][0].tolist()


def test_an_image_that_does_not_fit_says_what_it_takes(vision: Vision, shots: Path) -> None:
    wide = str(shots / "wide.png")
    alone = len(split(one({"query": "a", "positive_image": wide}, vision))[1])
    assert not Pairs().open(vision, length=alone).encode({"query": "a", "positive_image": wide}).truncated
    message = fault({"query": "a", "positive_image": wide}, vision, length=alone - 1)
    assert message.startswith(f"the image takes 3 tokens, and with the chat template {alone} are needed, but data.seq")
    assert message.endswith(
        f"sequence_length = {alone - 1}. Raise it, or lower model.max_pixels to make images smaller."
    )
    both = {"query": "abc", "query_image": wide, "positive": "b"}
    assert split(one(both, vision, length=alone + 1))[0][-3:-1] == [split(one(both, vision))[0][-5], 2]
    assert f"{alone + 1} are needed" in fault(both, vision, length=alone)
    with pytest.raises(RecipeError, match=r"^data\.sequence_length = 5 leaves no room for text: the chat template"):
        one({"query": "a", "positive": "b"}, vision, length=5)


def test_a_text_that_contains_the_image_token_is_refused(vision: Vision, shots: Path) -> None:
    for record in (
        {"query": "see <|image_pad|>", "positive": "b"},
        {"query": "see <|image_pad|>", "query_image": str(shots / "wide.png"), "positive": "b"},
    ):
        message = fault(record, vision)
        assert message.startswith(
            "the text 'see <|image_pad|>' contains <|image_pad|>, which this model reads as an image"
        )
    with pytest.raises(RecipeError, match=r"^data\.encode\.prompts: 'see <\|image_pad\|>' contains"):
        one({"query": "a", "positive": "b"}, vision, prompts=Prompts(document="see <|image_pad|>"))


# --- what is stored and batched


def test_features_are_the_same_with_and_without_images(vision: Vision, shots: Path, tmp_path: Path) -> None:
    record = {"query": "a", "positive": "b", "label": 3}
    for found in (one(record, vision), one({**record, "query_image": str(shots / "wide.png")}, vision)):
        assert {name: values.dtype for name, values in found.items()} == FEATURES
    prepared = run(write_lines(tmp_path / "a.jsonl", [record] * 3), tmp_path / "cache", vision)
    assert prepared.train_from.store.names == list(FEATURES)
    assert prepared.report[-1].startswith("train: 3 records, 3 samples,")
    batch = Loader(prepared.train, prepared.collator, per_device=2).first_batch()
    assert batch["pixels"] == []
    assert batch["grids"].shape == (0, 3)
    assert batch["images"].tolist() == [0, 0, 0, 0]


def test_a_batch_has_pixels_for_each_image(vision: Vision, shots: Path) -> None:
    records: list[dict[str, Any]] = [
        {"query": "a", "positive_image": "wide.png", "negative_images": ["other.png", "small.png"]},
        {"query_image": "small.png", "positive": "b"},
    ]
    batch = batch_of(records, vision, image_root=shots)
    assert set(batch) == {"tokens", "lengths", "texts", "label", "keys", "images", "pixels", "grids"}
    assert batch["images"].tolist() == [0, 1, 1, 1, 1, 0]
    assert batch["images"].dtype == batch["grids"].dtype == np.int64
    assert batch["grids"].tolist() == [[1, 2, 6], [1, 2, 6], [1, 2, 2], [1, 2, 2]]
    assert isinstance(batch["pixels"], list)
    assert [tuple(patches.shape) for patches in batch["pixels"]] == [(12, 1176), (12, 1176), (4, 1176), (4, 1176)]
    # Two images of one size have the same tokens and are not the same.
    _, wide, other, small, again, _ = batch["keys"].tolist()
    assert len({wide, other, small}) == 3
    assert small == again
    bare = Pairs()
    samples = bare.open(vision, length=LONG).encode({"query": "a", "positive": "b"}).samples
    text = PairCollator(bare, vision).collate(samples, length=None)
    assert text["keys"].tolist() == [batch["keys"][0], batch["keys"][5]]


def test_a_filler_has_no_images(vision: Vision, shots: Path) -> None:
    encoder = Pairs(image_root=shots)
    records = [{"query_image": "wide.png", "positive_image": "small.png"}] * 3
    samples = [encoder.open(vision, length=LONG).encode(record).samples[0] for record in records]
    collator = PairCollator(encoder, vision)
    blank = collator.blank(samples[0])
    assert split(blank) == [[1], [1]]
    assert {name: values.dtype for name, values in blank.items()} == FEATURES
    batch = Loader(samples, collator, per_device=2, rank=1, world=2).first_batch()
    assert batch["sample_ids"].tolist() == [1, -1]
    assert batch["images"].tolist() == [1, 1, 0, 0]
    assert len(batch["pixels"]) == 2


def test_the_processor_travels_with_the_collator_and_is_no_setting(vision: Vision, shots: Path) -> None:
    encoder = Pairs(image_root=shots)
    before = plain(encoder)
    sample = encoder.open(vision, length=LONG).encode({"query": "a", "positive_image": "wide.png"}).samples[0]
    collator = PairCollator(encoder, vision)
    expected = collator.collate([sample], length=None)
    assert plain(encoder) == before
    assert before["image_root"] == str(shots)
    moved = pickle.loads(pickle.dumps(collator))
    assert moved.collate([sample], length=None)["pixels"][0].equal(expected["pixels"][0])
    Pairs(image_root=shots, prompts=Prompts(query="find")).open(vision, length=64).annotate_processor()
    assert vision.prompts == {"query": "find"}
    assert vision.tokenizer.init_kwargs["prompts"] == {"query": "find"}


def test_batches_made_by_worker_processes_are_the_same(vision: Vision, shots: Path) -> None:
    encoder = Pairs(image_root=shots)
    records = [{"query": f"{at}", "positive_image": ("wide.png", "other.png")[at % 2]} for at in range(4)]
    samples = [encoder.open(vision, length=LONG).encode(record).samples[0] for record in records]
    collator = PairCollator(encoder, vision)
    here, there = (list(Loader(samples, collator, per_device=2, workers=workers).once()) for workers in (0, 1))
    assert len(here) == 2
    for one_batch, other in zip(here, there, strict=True):
        assert all(a.equal(b) for a, b in zip(one_batch["pixels"], other["pixels"], strict=True))
        assert one_batch["keys"].equal(other["keys"])
        assert np.array_equal(one_batch["grids"], other["grids"])
