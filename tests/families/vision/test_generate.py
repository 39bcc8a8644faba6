"""`fullshard generate --image`: token by token what Transformers generates with the exported model and processor; with
adapters, on several ranks, with and without images; and what it refuses."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.families.vision.models.vlm import Vlm
from tests import small
from tests.families.vision.small import MODELS, model_folder, settings, write_records
from tests.ranks import RankPool
from tests.slow import only_first
from tests.small import train

TOKENS = 8
ASKED = "What colour is this?"


def command(*words: str) -> tuple[int, str, str]:
    """The command on one rank of the pool, which was started by a launcher."""
    done = CliRunner().invoke(app, [*words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def generate(ranks: RankPool, *words: Any, world: int = 1) -> list[dict[str, Any]]:
    given = [*map(str, words), "--json", "--max-new-tokens", str(TOKENS)]
    (code, said, told), *others = ranks.run(command, "generate", *given, world=world)
    assert code == 0, told
    assert [other[:2] for other in others] == [(0, "")] * (world - 1)
    return [json.loads(line) for line in said.splitlines()]


@torch.no_grad()
def by_transformers(folder: Path, content: list[dict[str, Any]]) -> list[int]:
    """What Transformers answers, called as its documentation says."""
    processor = Vlm(path=str(folder)).load_processor(folder, where="model.path").whole
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    messages = [{"role": "user", "content": content}]
    images = [Image.open(part["path"]).convert("RGB") for part in content if part["type"] == "image"]
    if processor.tokenizer.chat_template:
        text = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    else:
        text = "<image>" * len(images) + "".join(part.get("text", "") for part in content)
    given = {"images": [images]} if images else {}
    kinds = {"return_mm_token_type_ids": True} if "mm_token_type_ids" in processor.model_input_names else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PaliGemma's makes a NumPy array of a tensor
        inputs = processor(text=[text], **given, return_tensors="pt", **kinds)
    made = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, **stops(model, processor.tokenizer))
    return made[0, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


def stops(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Where an answer ends: at the stop tokens of the model and of the tokenizer."""
    own = model.generation_config.eos_token_id
    own = own if isinstance(own, list) else [own]
    ends = sorted({tokenizer.eos_token_id, *own} - {None})
    return {"eos_token_id": ends, "pad_token_id": ends[0]}


def asked(*files: Path, text: str = ASKED) -> list[dict[str, Any]]:
    return [*({"type": "image", "path": str(file)} for file in files), {"type": "text", "text": text}]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    files = [folder / "one.png", folder / "two.png"]
    for number, file in enumerate(files):
        noise = torch.randint(0, 255, (40 + 8 * number, 32, 3), generator=torch.Generator().manual_seed(number))
        Image.fromarray(noise.to(torch.uint8).numpy()).save(file)
    return files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llava")
    model_folder(path / "model", "llava")
    write_records(path, [1, 0, 2, 1, 1, 1, 0, 1])
    return path


@pytest.mark.parametrize("architecture", only_first(["qwen2_5_vl", *(m for m in MODELS if m != "qwen2_5_vl")]))
def test_a_model_answers_as_in_transformers(
    ranks: RankPool, tmp_path: Path, pictures: list[Path], architecture: str
) -> None:
    """One image, two, and none."""
    model = model_folder(tmp_path / "model", architecture)
    one, two = pictures
    # PaliGemma needs an image.
    for files in ([one], [one, two], *([] if "paligemma" in architecture else [[]])):
        given = [word for file in files for word in ("--image", file)]
        [found] = generate(ranks, model, *given, "--prompt", ASKED)
        assert found["tokens"] == by_transformers(model, asked(*files)), len(files)


def test_a_run_and_its_export_answer_alike_on_any_ranks(ranks: RankPool, folder: Path, pictures: list[Path]) -> None:
    """Prompts with and without images share the ranks."""
    ranks.run(train, settings(folder, "run", duration={"steps": 2}, optimizer={"lr": 1e-4}), world=2)
    run, (one, two) = folder / "runs" / "run", pictures
    export = run / "model"
    again = f"{ASKED} <image> And this? <image>"
    expected = [
        by_transformers(export, asked(one, two)),
        by_transformers(export, [*asked(text=f"{ASKED} "), *asked(one, text=" And this? "), *asked(two)[:1]]),
    ]
    both = ["--image", one, "--image", two]
    assert all(len(row) > 1 for row in expected)
    for target, world in ((run, 1), (run, 2), (export, 1)):
        found = generate(ranks, target, *both, "--prompt", ASKED, "--prompt", again, world=world)
        assert [record["tokens"] for record in found] == expected, (target, world)
    mixed = [{"role": "user", "content": asked(one)}], [{"role": "user", "content": ASKED}]
    given = [word for messages in (mixed[0], mixed[1], mixed[0]) for word in ("--messages", json.dumps(messages))]
    with_image, without = by_transformers(export, asked(one)), by_transformers(export, asked())
    assert with_image != without
    for world in (2, 3):
        found = generate(ranks, run, *given, "--batch-size", 2, world=world)
        assert [record["tokens"] for record in found] == [with_image, without, with_image]


def refused(ranks: RankPool, *words: Any) -> str:
    [(code, _, told)] = ranks.run(command, "generate", *map(str, words), world=1)
    assert code == 2
    assert "Traceback" not in told
    return told  # type: ignore[no-any-return]


def test_mistakes_are_explained(ranks: RankPool, folder: Path, pictures: list[Path], tmp_path: Path) -> None:
    model, one = folder / "model", ["--image", pictures[0]]
    (tmp_path / "words.png").write_text("no image")
    told = refused(ranks, model, "--image", tmp_path / "none.png", "--prompt", ASKED)
    assert f"the image {tmp_path}/none.png cannot be read: No such file" in " ".join(told.split())
    told = refused(ranks, model, "--image", tmp_path / "words.png", "--prompt", ASKED)
    assert "words.png cannot be read: unknown image format. Give the path of an image file" in " ".join(told.split())
    assert "1 place for images" in refused(ranks, model, *one, *one, "--prompt", "<image> What is it?")
    assert "1 place for images" in refused(ranks, model, *one, *one, "--raw", "--prompt", "<image> What is it?")
    assert "there is no prompt" in refused(ranks, model, *one)
    assert "nothing is downloaded" in refused(ranks, model, "--image", "https://a.b/c.png", "--prompt", ASKED)
    small.model_folder(tmp_path / "text")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, tmp_path / "text")
    told = refused(ranks, tmp_path / "text", *one, "--prompt", ASKED)
    assert "the model is of kind hf, which takes text only. Leave --image out" in " ".join(told.split())
