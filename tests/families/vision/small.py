"""Small vision-language models in folders, conversations with drawn pictures, and a plain loop to compare with."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedTokenizerFast

from fullshard.families.vision.fresh_processor import fresh_processor
from fullshard.families.vision.sizes import tiny_vision
from fullshard.families.vision.sources.desktop_episodes import DesktopEpisodes
from fullshard.hf.tokenizers.tokenizer import TokenizerTraining, train_tokenizer
from tests.families.plain_loop import trained_plainly
from tests.small import recipe

MODELS = [
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "smolvlm",
    "idefics3",
    "llava",
    "llava_next",
    "llava_onevision",
    "internvl",
    "paligemma",
    "paligemma2",
    "gemma3",
]
"""Every third has another mechanism: positions in three dimensions, plain, tiles, token types."""
COLOURS = ["red", "green", "blue", "black"]


def model_folder(path: Path, architecture: str) -> Path:
    """A model with random weights and its processor, as Transformers saves them."""
    words = path.parent / "words"
    train_tokenizer(
        ["What colour is this? User: Assistant: red green blue black and " * 9],
        TokenizerTraining(vocab_size=330),
        folder=words,
    )
    config_class = CONFIG_MAPPING[architecture.removesuffix("2")]
    base = config_class(text_config={"model_type": "gemma2"}) if architecture == "paligemma2" else config_class()
    config = config_class(**tiny_vision(base))
    processor = fresh_processor(config, PreTrainedTokenizerFast.from_pretrained(words))
    config.text_config.vocab_size = len(processor.tokenizer)
    for name in ("image_token_id", "image_token_index"):
        if hasattr(config, name):
            setattr(config, name, processor.image_token_id)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            # Norms of one and biases of zero would hide mistakes.
            torch.nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=0.1)
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path


def write_records(folder: Path, images_of_each: list[int]) -> Path:
    """Conversations, each with so many pictures of its own size."""
    lines = []
    (folder / "images").mkdir(exist_ok=True)
    for number, images in enumerate(images_of_each):
        names = []
        for which in range(images):
            colour = COLOURS[(number + which) % 4]
            image = Image.new("RGB", (24 + 8 * (number % 3), 40 + 4 * which), colour)
            ImageDraw.Draw(image).line((0, number, 20, 20), fill="white", width=2)
            names.append(f"{number}-{which}.png")
            image.save(folder / "images" / names[-1])
        question = [{"type": "image", "image": name} for name in names]
        question += [{"type": "text", "text": f"What colour is this? {number}"}]
        answer = " and ".join(COLOURS[(number + which) % 4] for which in range(images)) or "black"
        lines.append(
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]},
        )
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def write_recordings(path: Path, *, episodes: int) -> Path:
    """Generated desktop recordings as rows in a file, with screens as data URIs."""
    source = DesktopEpisodes(episodes=episodes, size=32).open()
    lines = []
    for index in range(len(source)):
        row = dict(source[index])
        if isinstance(row["message"], bytes):
            uri = f"data:image/png;base64,{b64encode(row['message']).decode()}"
            row["message"] = json.dumps({"media_ref": {"uri": uri}})
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))
    return path


def settings(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    """A recipe over the records in their own order."""
    own: dict[str, Any] = {
        "model": {"kind": "vlm"},
        "objective": {"kind": "vision_lm"},
        "data": {
            "train": str(folder / "chats.jsonl"),
            "encode": {"kind": "image_chat", "image_root": str(folder / "images")},
            "sequence_length": 512,
        },
        "batch": {"per_device": 2, "global": 8},
        "duration": {"steps": 3},
        "optimizer": {"lr": 1e-3},
        "schedule": {"kind": "constant"},
    }
    both = {key: {**own.get(key, {}), **sections.get(key, {})} for key in own | sections}
    return recipe(folder, name=name, **both)


def plain_loop(
    folder: Path,
    *,
    steps: int,
    batch: int = 8,
    frozen: tuple[str, ...] = (),
    rates: Mapping[str, float] | None = None,
    model: Any = None,
) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of a plain loop in one process, one record at a time.

    Inputs come from the processor of Transformers, called as its documentation says."""
    model = model or AutoModelForImageTextToText.from_pretrained(folder / "model")
    records = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    inputs = [processed(folder, record) for record in records]
    return trained_plainly(model, inputs, steps=steps, batch=batch, frozen=frozen, rates=rates)


def processed(folder: Path, record: dict[str, Any]) -> dict[str, torch.Tensor]:
    """One record as Transformers' own processor makes it, with the answer as labels."""
    from fullshard.families.vision.models.vlm import Vlm

    processor = Vlm(path=str(folder / "model")).load_processor(folder / "model", where="model.path").whole
    parts = [
        part for message in record["messages"] if isinstance(message["content"], list) for part in message["content"]
    ]
    images = [Image.open(folder / "images" / part["image"]).convert("RGB") for part in parts if part["type"] == "image"]
    if type(processor).__name__ == "PaliGemmaProcessor":
        question = "<image>" * len(images) + "".join(part["text"] for part in parts if part["type"] == "text")
        answer = record["messages"][1]["content"]
        # Its tensors of torch come with a warning of NumPy's.
        found = processor(text=[question], images=[images], suffix=[answer], return_tensors="np")
        return {name: torch.from_numpy(value) for name, value in found.items()}
    texts = [
        processor.tokenizer.apply_chat_template(
            record["messages"][:until], tokenize=False, add_generation_prompt=until == 1
        )
        for until in (1, 2)
    ]
    kinds = {"return_mm_token_type_ids": True} if "mm_token_type_ids" in processor.model_input_names else {}
    pictures = {"images": [images]} if images else {}
    asked, whole = (processor(text=[text], **pictures, return_tensors="pt", **kinds) for text in texts)
    labels = whole["input_ids"].clone()
    labels[:, : asked["input_ids"].shape[1]] = -100
    # What the template writes after the end of the answer is not learned.
    end = int((whole["input_ids"][0] == processor.tokenizer.eos_token_id).nonzero()[-1])
    labels[:, end + 1 :] = -100
    return {**whole, "labels": labels}
