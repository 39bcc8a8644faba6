"""The processor of a vision-language model: tokenizer, image processor, and the chat template that joins the two.

Its parts are loaded one by one, because Transformers' class needs torchvision for videos. Supports models like
Qwen2-VL, which take patches and a grid for each image. Must not know records, models or losses.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullshard.errors import RecipeError

FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of an image processor."""
_BESIDE = ("processor_config.json", "video_preprocessor_config.json")
_TOKENS = ("image_token", "<|image_pad|>")


@dataclass
class Vision:
    """Turns texts and images into what the model takes."""

    tokenizer: Any
    image_processor: Any
    image_token: str
    beside: dict[str, Any]
    """Other settings of the folder, by file; saved unchanged, except for the image processor."""
    template: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template besides the messages."""
    prompts: dict[str, str] = field(default_factory=dict)

    @property
    def image_token_id(self) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(self.image_token))

    @property
    def merge(self) -> int:
        """The side of the square of patches that becomes one token."""
        return int(self.image_processor.merge_size)

    def render(self, text: str | None, *, image_tokens: int = 0, prompt: str = "") -> str:
        """One input in the chat template: the prompt as system message, then the image and the text."""
        content: list[dict[str, str]] = [{"type": "image"}] if image_tokens else []
        content += [{"type": "text", "text": text}] if text is not None else []
        system = [{"role": "system", "content": [{"type": "text", "text": prompt}]}] if prompt else []
        messages = [*system, {"role": "user", "content": content}]
        found = str(self.tokenizer.apply_chat_template(messages, tokenize=False, **self.template))
        # Only the template's: the text may contain the token too.
        at = found.rfind(self.image_token) if image_tokens and not (text and self.image_token in text) else -1
        if image_tokens and at < 0:
            raise RecipeError(
                f"model: the chat template does not write {self.image_token} for an image, or a text contains it. "
                "Use the template that belongs to the model, and remove the token from texts."
            )
        return found if at < 0 else found[:at] + self.image_token * image_tokens + found[at + len(self.image_token) :]

    def image_tokens(self, width: int, height: int) -> int:
        """The number of tokens of an image."""
        return int(self.image_processor.get_number_of_image_patches(height, width, {})) // self.merge**2

    def pixels(self, image: Any) -> tuple[torch.Tensor, np.ndarray]:
        """The patches of one image, (patches, values), and their number in time, height and width."""
        found = self.image_processor(images=[image.convert("RGB")], return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"][0].numpy()

    def limit(self, max_pixels: int) -> None:
        """Shrinks images with more pixels; exported with the processor."""
        size = {key: self.image_processor.size[key] for key in ("shortest_edge", "longest_edge")}
        self.image_processor.size = {**size, "longest_edge": max_pixels}

    def to_json_string(self) -> str:
        """Everything that determines the layout of inputs, except the tokenizer and the prompts."""
        images = {key: value for key, value in self.image_processor.to_dict().items() if not key.startswith("_")}
        return json.dumps([images, self.template, self.image_token], sort_keys=True, default=str)

    def save_pretrained(self, folder: Any) -> None:
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)
        for name, settings in self.beside.items():
            mine = {"image_processor": self.image_processor.to_dict()} if "image_processor" in settings else {}
            (Path(folder) / name).write_text(json.dumps({**settings, **mine}, indent=2, default=str) + "\n")


def has_vision(folder: Path) -> bool:
    """Whether a folder has an image processor."""
    return any((folder / name).is_file() for name in FILES)


def load_vision(tokenizer: Any, folder: Path, *, trust_remote_code: bool, where: str) -> Vision:
    """The processor of a folder, with its tokenizer."""
    from transformers import AutoImageProcessor

    try:
        images = AutoImageProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # of any kind
        raise RecipeError(
            f"{where}: {folder} has an image processor that cannot be loaded ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'})."
        ) from error
    if not hasattr(images, "get_number_of_image_patches") or not hasattr(images, "merge_size"):
        raise RecipeError(
            f"{where}: {type(images).__name__} is not supported; only models like Qwen2-VL are, which take "
            "patches and a grid for each image."
        )
    name, usual = _TOKENS
    token = str(getattr(tokenizer, name, None) or usual)
    if tokenizer.get_vocab().get(token) is None or not tokenizer.chat_template:
        raise RecipeError(
            f"{where}: {folder} has an image processor, but its tokenizer has no {token} or no chat template, so "
            "the place of an image among the tokens is unknown."
        )
    beside = {name: json.loads((folder / name).read_text()) for name in _BESIDE if (folder / name).is_file()}
    return Vision(tokenizer, images, token, beside)
