"""What is learned of conversations with images, token by token, and what bad records are told."""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fullshard.contracts.data import IGNORE
from fullshard.data.sources.files import Files
from fullshard.errors import DataError, RecipeError
from fullshard.families.vision.encoders.image_chat import ImageChat
from fullshard.families.vision.models.vlm import Vlm
from tests.families.vision.small import model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vlm")
    for name in ("smolvlm", "qwen2_vl", "paligemma"):
        model_folder(path / name, name)
    Image.new("RGB", (32, 32), "red").save(path / "red.png")
    Image.new("RGB", (64, 32), "blue").save(path / "blue.png")
    (path / "broken.png").write_bytes((path / "red.png").read_bytes()[:60])
    return path


def opened(folder: Path, name: str = "smolvlm", *, length: int = 256, **settings: Any) -> Any:
    processor = Vlm(path=str(folder / name)).load_processor(folder / name, where="model.path")
    return ImageChat(image_root=folder, **settings).open(processor, length=length)


def png(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (32, 32), colour).save(file, format="PNG")
    return file.getvalue()


def asked(content: Any, answer: str = "red", **columns: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **columns}


def shown(encoder: Any, sample: Any) -> str:
    """The sample as text; what is learned stands in brackets, an image as its number of tokens."""
    tokenizer, image = encoder.processor.tokenizer, encoder.processor.image_token_id
    text, learned = "", False
    targets = np.concatenate([[IGNORE], sample["labels"][:-1]]) != IGNORE
    for token, counts in zip(sample["input_ids"].tolist(), targets.tolist(), strict=True):
        text += ("[" if counts else "]") * (counts != learned)
        text += "#" if token == image else tokenizer.decode([token])
        learned = counts
    return text + "]" * learned


PART = {"type": "image", "image": "red.png"}
TEXT = {"type": "text", "text": "What colour?"}
ONE = "<fake_token_around_image><global-img>####<fake_token_around_image>"
ENDED = "User: {}What colour?\nAssistant:[ red<|endoftext|>]\n"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (asked([PART, TEXT]), ENDED.format(ONE)),
        (asked([TEXT, PART]), f"User: What colour?{ONE}\nAssistant:[ red<|endoftext|>]\n"),
        (asked([PART, PART, TEXT]), ENDED.format(ONE + ONE)),
        (asked([{"type": "image_url", "image_url": {"url": "red.png"}}, TEXT]), ENDED.format(ONE)),
        (asked([{"type": "image"}, TEXT], images=["red.png"]), ENDED.format(ONE)),
        (asked("<image>\nWhat colour?", image="red.png"), ENDED.format(ONE)),
        (asked("What colour?", images=[png("red")]), ENDED.format(ONE)),
        (asked("What colour?", images=[{"bytes": png("red"), "path": None}]), ENDED.format(ONE)),
        (asked("What colour?"), ENDED.format("")),
        (asked("What colour?", images=[]), ENDED.format("")),
        ({"question": "What colour?", "answer": "red", "image": "red.png"}, ENDED.format(ONE)),
    ],
)
def test_what_is_learned_of_each_form(folder: Path, record: dict[str, Any], expected: str) -> None:
    encoder = opened(folder)
    [sample] = encoder.encode(record).samples
    assert shown(encoder, sample) == expected


def test_a_data_uri_is_the_image_itself(folder: Path) -> None:
    encoded = base64.b64encode(png("red")).decode()
    for held in ({"image": f"data:image/png;base64,{encoded}"}, {"base64": encoded}):
        [sample] = opened(folder).encode(asked([{"type": "image", **held}, TEXT])).samples
        assert sample["image_data"].tobytes() == png("red")


def test_several_turns_learn_every_answer(folder: Path) -> None:
    record = asked([PART, TEXT])
    record["messages"] += [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "red"}]
    encoder = opened(folder)
    [sample] = encoder.encode(record).samples
    assert shown(encoder, sample) == ENDED.format(ONE) + "User: Sure?\nAssistant:[ red<|endoftext|>]\n"


def test_an_image_in_an_answer_is_not_learned(folder: Path) -> None:
    record = asked("Draw", [{"type": "text", "text": "red"}, PART])
    for train_on in ("answers", "all"):
        encoder = opened(folder, train_on=train_on)
        [sample] = encoder.encode(record).samples
        assert encoder.processor.image_token_id not in sample["labels"]
        assert f"]{ONE}[" in shown(encoder, sample)


def test_positions_of_a_model_that_counts_in_three_dimensions(folder: Path) -> None:
    """Those of Transformers' own method: a 4 x 2 image counts its height and width."""
    encoder = opened(folder, "qwen2_vl")
    [sample] = encoder.encode(asked([{"type": "image", "image": "blue.png"}, TEXT])).samples
    image = sample["input_ids"] == encoder.processor.image_token_id
    start = int(np.flatnonzero(image)[0])
    inside = sample["mrope"][image] - start
    assert inside.tolist() == [[0, row, column] for row in range(2) for column in range(4)]
    assert sample["mrope"][-1].tolist() == [sample["mrope"][image].max() + int((~image)[start:].sum())] * 3


def error_of(folder: Path, record: dict[str, Any], **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        opened(folder, **settings).encode(record)
    return str(caught.value)


def test_bad_images_are_named(folder: Path) -> None:
    assert "none.png" in (missing := error_of(folder, asked("?", images=["none.png"])))
    assert "No such file" in missing
    assert "broken.png" in error_of(folder, asked("?", images=["broken.png"]))
    assert "allow_urls" in error_of(folder, asked("?", images=["https://example.org/a.png"]))
    assert "base64" in error_of(folder, asked("?", images=["data:image/png;base64,@@"]))
    assert "2 places" in (mixed := error_of(folder, asked("<image><image>", images=["red.png"])))
    assert "1 image" in mixed
    assert "one place" in error_of(folder, asked([PART, TEXT], images=["red.png"]))
    skipped = opened(folder, unreadable="skip").encode(asked("?", images=["none.png"]))
    assert not skipped.samples
    assert "cannot be read" in skipped.dropped[0].reason


def test_more_images_than_fit_are_an_error_or_a_counted_skip(folder: Path) -> None:
    record = asked([PART] * 5 + [TEXT])
    assert "data.sequence_length = 20" in error_of(folder, record, length=20)
    assert not opened(folder, length=20, too_long="skip").encode(record).samples


def test_a_long_answer_is_cut_and_counted(folder: Path) -> None:
    found = opened(folder, length=24).encode(asked([PART, TEXT], "red " * 50))
    assert found.truncated == 1
    assert len(found.samples[0]["input_ids"]) == 24


def test_the_placeholder_in_a_text_is_no_image(folder: Path) -> None:
    record = json.loads(json.dumps(asked("What does <|image_pad|> mean?")))
    with pytest.raises(DataError, match="more often than it has images"):
        opened(folder, "qwen2_vl").encode(record)


QUESTION = "################<|endoftext|>What colour?\n"
"""An image, the first token of a prompt, and the question, as PaliGemma's processor writes them."""


def test_a_question_is_a_prefix_and_its_answer_a_suffix(folder: Path) -> None:
    """As PaliGemma's own processor lays them out."""
    encoder = opened(folder, "paligemma")
    [sample] = encoder.encode(asked([PART, TEXT])).samples
    assert shown(encoder, sample) == QUESTION + "[red<|endoftext|>]"
    expected = encoder.processor.whole(
        text=["<image>What colour?"], images=[[Image.open(folder / "red.png")]], suffix=["red"], return_tensors="np"
    )
    assert sample["input_ids"].tolist() == expected["input_ids"][0].tolist()
    assert sample["token_type_ids"].tolist() == expected["token_type_ids"][0].tolist()
    assert sample["labels"].tolist() == [*expected["labels"][0, 1:].tolist(), IGNORE]
    behind = encoder.encode(asked([TEXT, PART]))
    assert shown(encoder, behind.samples[0]) == QUESTION + "[red<|endoftext|>]"
    assert list(behind.noted) == ["an image after text; the model reads images first"]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (asked("What colour?"), "PaliGemmaProcessor needs at least one"),
        (asked([PART, TEXT], [PART]), "PaliGemmaProcessor reads images in the question"),
        (asked([PART, TEXT], system="Be brief."), "the roles system, user and assistant"),
        ({"messages": asked([PART, TEXT])["messages"] * 2}, "Give one user message and one assistant message"),
    ],
)
def test_what_has_no_prefix_and_suffix_is_refused(folder: Path, record: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        opened(folder, "paligemma").encode(record)


def test_a_prefix_cannot_be_learned(folder: Path) -> None:
    with pytest.raises(DataError, match=r"Set data\.encode\.train_on: answers"):
        opened(folder, "paligemma", train_on="all")


def test_a_processor_that_needs_torchvision_has_the_install_line(folder: Path, tmp_path: Path) -> None:
    """Transformers has no image processor of Llama 4 without it."""
    place = shutil.copytree(folder / "smolvlm", tmp_path / "model")
    (place / "preprocessor_config.json").write_text('{"image_processor_type": "Llama4ImageProcessor"}')
    with pytest.raises(RecipeError, match=r"Install it with: pip install torchvision$"):
        Vlm(path=str(place)).load_processor(place, where="model.path")


@pytest.mark.parametrize("form", ["folder", "parquet"])
def test_images_as_the_datasets_library_stores_them(folder: Path, tmp_path: Path, form: str) -> None:
    from datasets import Dataset, Features, Sequence, Value
    from datasets import Image as Column

    features = Features({"images": Sequence(Column()), "question": Value("string"), "answer": Value("string")})
    blue = Image.new("RGB", (64, 32), "blue")
    columns = {"images": [[str(folder / "red.png")], [blue]]}
    stored = Dataset.from_dict({**columns, "question": ["What colour?"] * 2, "answer": ["red", "blue"]}, features)
    place = tmp_path / ("data" if form == "folder" else "data.parquet")
    stored.save_to_disk(place) if form == "folder" else stored.to_parquet(place)
    records = Files(path=str(place)).open()
    encoder = opened(folder)
    [first], [second] = (encoder.encode(records[index]).samples for index in range(2))
    assert shown(encoder, first) == ENDED.format(ONE)
    with Image.open(io.BytesIO(second["image_data"].tobytes())) as image:
        assert np.array_equal(np.asarray(image), np.asarray(blue))


def test_settings_of_the_image_processor(folder: Path) -> None:
    def load(**settings: Any) -> Any:
        model = Vlm(path=str(folder / "smolvlm"), image_processor=settings)
        return model.load_processor(folder / "smolvlm", where="model.path")

    # Four tiles and the whole image, or the whole image alone.
    split, whole = (load(do_image_splitting=on, size={"longest_edge": 64}) for on in (True, False))
    assert split.image_texts([(64, 64)])[0].count("<image>") == 5 * whole.image_texts([(64, 64)])[0].count("<image>")
    with pytest.raises(RecipeError, match=r"model.image_processor.do_resiz is not a setting of .* \(did you mean"):
        load(do_resiz=False)
