"""States of texts, made once when data is prepared: the settings of data.encode.text, and the encoder while it is
needed.

Any text encoder of Transformers. Must not know records, stores, losses or ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from fullshard.errors import RecipeError
from fullshard.part import Section

if TYPE_CHECKING:
    import torch

WHERE = "data.encode.text.path"
_PART = "text_encoder"
_AT_ONCE = {"cpu": 8, "cuda": 64}
_TEXT_SIDE = {"CLIPModel": "CLIPTextModel", "SiglipModel": "SiglipTextModel"}
"""Models of images and texts, and the class of their text side."""


@dataclass(frozen=True)
class TextState:
    """What an encoder makes of one text."""

    states: np.ndarray
    """(tokens, width) fp32."""
    pooled: np.ndarray | None
    """(width,) fp32, for encoders that give it."""
    is_cut: bool


class Texts(Section):
    """A frozen text encoder."""

    path: str
    """A folder or hub name: of a text encoder of Transformers with its tokenizer, or of a pipeline that has one."""
    part: str = _PART
    """Which part of a pipeline it is: text_encoder, text_encoder_2, text_encoder_3."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    max_tokens: int = Field(77, ge=1)
    """Longer texts are cut."""
    padded: bool | None = None
    """Whether every text is filled up to max_tokens and the filling counts as text, as Stable Diffusion and Flux have
    it; false: the model is told where the text ends, as PixArt has it. null: true for CLIP, false for others."""

    @classmethod
    def from_short(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    def folder(self) -> Path:
        from fullshard.diffusion.parts import part_folder

        return part_folder(self.path, self.part, revision=self.revision, where=WHERE)

    def tokenizer_folder(self) -> Path:
        """The encoder's own folder, or its neighbour in a pipeline."""
        from fullshard.hf.tokenizer import TOKENIZER_FILES

        own = self.folder()
        beside = own.parent / own.name.replace(_PART, "tokenizer")
        for folder in (own, beside):
            if any((folder / name).is_file() for name in TOKENIZER_FILES):
                return folder
        raise RecipeError(
            f"{WHERE}: there is no tokenizer in {own}, and none in {beside}. Save the tokenizer beside the encoder."
        )

    def files(self) -> list[Path]:
        """What the states follow from, beside the texts."""
        from fullshard.diffusion.parts import content

        folders = dict.fromkeys([self.folder(), self.tokenizer_folder()])
        return [file for folder in folders for file in content(folder)]

    def open(self) -> TextEncoder:
        """The encoder itself, on a device of its own choice, in fp32."""
        import torch
        import transformers

        from fullshard.diffusion import parts
        from fullshard.hf.tokenizer import load_tokenizer

        folder = self.folder()
        config = json.loads((folder / parts.CONFIG).read_text(encoding="utf-8"))
        name = (config.get("architectures") or [""])[0]
        # A model that also writes text (T5) is read without that part.
        usual = transformers.AutoModelForTextEncoding if "ForConditional" in name else transformers.AutoModel
        loader = getattr(transformers, _TEXT_SIDE.get(name, name), None) if "For" not in name else None
        module = (loader or usual).from_pretrained(folder, dtype=torch.float32).requires_grad_(False).eval()
        tokenizer = load_tokenizer(self.tokenizer_folder(), trust_remote_code=False, where=WHERE)
        self._check(module, tokenizer)
        padded = self.padded if self.padded is not None else "clip" in str(module.config.model_type)
        return TextEncoder(module.to(parts.device()), tokenizer, self.max_tokens, padded)

    def _check(self, module: Any, tokenizer: Any) -> None:
        longest = getattr(module.config, "max_position_embeddings", None)
        if longest is not None and self.max_tokens > longest:
            raise RecipeError(
                f"data.encode.text.max_tokens = {self.max_tokens}, and {type(module).__name__} has positions for "
                f"{longest} tokens. Lower it to at most {longest}."
            )
        if tokenizer.pad_token_id is None:
            raise RecipeError(f"{WHERE}: the tokenizer has no token for padding. Give it one, and save it again.")


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder in memory."""

    module: Any
    tokenizer: Any
    max_tokens: int
    padded: bool

    def encode(self, texts: Sequence[str]) -> Iterator[TextState]:
        """In order."""
        at_once = _AT_ONCE[self.module.device.type]
        for start in range(0, len(texts), at_once):
            yield from self._encode(list(texts[start : start + at_once]))

    def _encode(self, texts: list[str]) -> Iterator[TextState]:
        import torch

        # One token more than there may be shows which texts are too long.
        lengths = [len(ids) for ids in self._tokens(texts, self.max_tokens + 1)["input_ids"]]
        filled = "max_length" if self.padded else "longest"
        found = self._tokens(texts, self.max_tokens, padding=filled, return_tensors="pt")
        found = found.to(self.module.device)
        ids, mask = found["input_ids"], found["attention_mask"]
        with torch.no_grad():
            output = self.module(input_ids=ids, **({} if self.padded else {"attention_mask": mask}))
        pooled = _pooled(output)
        for index, length in enumerate(lengths):
            states = output.last_hidden_state[index]
            states = states if self.padded else states[mask[index].bool()]
            whole = None if pooled is None else pooled[index].float().cpu().numpy()
            yield TextState(states.float().cpu().numpy(), whole, length > self.max_tokens)

    def _tokens(self, texts: list[str], most: int, **settings: Any) -> Any:
        return self.tokenizer(texts, truncation=True, max_length=most, **settings)


def _pooled(output: Any) -> torch.Tensor | None:
    """One vector a text: projected where the encoder does that."""
    for name in ("text_embeds", "pooler_output"):
        if (found := getattr(output, name, None)) is not None:
            return found  # type: ignore[no-any-return]
    return None


__all__ = ["TextEncoder", "TextState", "Texts"]
