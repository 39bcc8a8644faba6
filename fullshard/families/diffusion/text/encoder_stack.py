"""Frozen text encoders: the settings of data.encode.text, tokenization, and encoding while data is prepared.

Any text encoder of Transformers. Must not know records, stores, losses or ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from fullshard.config.part import Section
from fullshard.errors import RecipeError

if TYPE_CHECKING:
    import torch

    from fullshard.contracts.model import Family

Join = Literal["flux", "sdxl", "sd3"]
NoText = Literal["encoded", "zeros"]
NO_TOKEN = -1
"""Pads the tokens of a text."""
WHERE = "data.encode.text.path"
_PART = "text_encoder"
_AT_ONCE = {"cpu": 8, "cuda": 64}


@dataclass(frozen=True)
class TextState:
    """One encoded text."""

    states: np.ndarray
    """(tokens, width) fp32."""
    pooled: np.ndarray | None
    """(width,) fp32, if an encoder gives it."""
    is_cut: bool


@dataclass(frozen=True)
class Tokens:
    """Tokenized texts: the tokens of all encoders, concatenated."""

    ids: np.ndarray
    """(texts, tokens of all encoders) int64, padded with NO_TOKEN."""
    is_cut: np.ndarray
    """(texts,) bool: truncated for the last encoder."""


class Texts(Section):
    """A frozen text encoder."""

    path: str
    """A folder or hub name: of a text encoder of Transformers with its tokenizer, or of a pipeline that has one."""
    part: str = _PART
    """Which part of a pipeline it is: text_encoder, text_encoder_2, text_encoder_3."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    max_tokens: int = Field(77, ge=1)
    """Longer texts are truncated."""
    padded: bool | None = None
    """Whether every text is padded to max_tokens and padding counts as text, as in Stable Diffusion, SD3 and Flux;
    false: the model gets a mask of the text, as in PixArt. null: true for CLIP and for each of several encoders, false
    for any other single encoder."""
    lowercase: bool | None = None
    """Whether texts are lowercased and stripped; null: as in PixArt's pipeline, if padded is false."""
    live: bool = False
    """false: texts are encoded once, and their states kept in data.cache. true: only tokens are kept, and the encoder,
    sharded like any model, runs in every step."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """The precision it computes in, independent of the trained model."""

    @classmethod
    def from_short(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    def folder(self) -> Path:
        from fullshard.families.diffusion.pipeline_parts import part_folder

        return part_folder(self.path, self.part, revision=self.revision, where=WHERE)

    def tokenizer_folder(self) -> Path:
        """The encoder's own folder, or the tokenizer folder beside it in a pipeline."""
        from fullshard.hf.tokenizers.tokenizer import TOKENIZER_FILES

        own = self.folder()
        beside = own.parent / own.name.replace(_PART, "tokenizer")
        for folder in (own, beside):
            if any((folder / name).is_file() for name in TOKENIZER_FILES):
                return folder
        raise RecipeError(
            f"{WHERE}: neither {own} nor {beside} has a tokenizer. Save the tokenizer beside the encoder."
        )

    @property
    def is_padded(self) -> bool:
        """Whether padding counts as text."""
        if self.padded is not None:
            return self.padded
        from fullshard.families.diffusion.text.encoder_model import is_clip_folder

        return is_clip_folder(self.folder())

    def files(self) -> list[Path]:
        """The files that decide the states."""
        from fullshard.families.diffusion.pipeline_parts import content

        folders = dict.fromkeys([self.folder(), self.tokenizer_folder()])
        return [file for folder in folders for file in content(folder)]

    def tokenizer(self) -> Any:
        from fullshard.hf.tokenizers.tokenizer import load_tokenizer

        found = load_tokenizer(self.tokenizer_folder(), trust_remote_code=False, where=WHERE)
        if found.pad_token_id is None:
            raise RecipeError(f"{WHERE}: the tokenizer has no padding token. Add one, and save it again.")
        return found

    def bound(self, module: Any, *, early: bool, join: Join) -> Any:
        """Gives a module of this encoder its method `encode_texts`."""
        from fullshard.families.diffusion.text.encoder_model import bind

        longest = getattr(module.config, "max_position_embeddings", None)
        if longest is not None and self.max_tokens > longest:
            raise RecipeError(
                f"data.encode.text.max_tokens = {self.max_tokens}, but {type(module).__name__} has positions for "
                f"{longest} tokens. Lower it to at most {longest}."
            )
        tokenizer = self.tokenizer()
        rows = getattr(module.get_input_embeddings(), "num_embeddings", None)
        if rows is not None and len(tokenizer) > rows:
            raise RecipeError(
                f"{WHERE}: the tokenizer in {self.tokenizer_folder()} has {len(tokenizer):,} tokens, but the embedding "
                f"of {type(module).__name__} has {rows:,} rows: it belongs to another encoder. Save the encoder's own "
                "tokenizer beside it."
            )
        fill = tokenizer.pad_token_id
        return bind(module, tokens=self.max_tokens, fill=fill, padded=self.is_padded, early=early, join=join)

    def open(self, *, early: bool, join: Join) -> Any:
        """The whole encoder on this process's device."""
        import torch

        from fullshard.families.diffusion import pipeline_parts
        from fullshard.families.diffusion.text.encoder_model import load

        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        return self.bound(load(self.folder(), dtype=dtype, device=pipeline_parts.device()), early=early, join=join)


class TextStack:
    """All text encoders of a recipe, at least one, and how their states are combined."""

    def __init__(self, texts: Sequence[Texts], join: Join, *, no_text: NoText | None = None) -> None:
        # Pipelines with several encoders pass no text mask to the denoiser.
        several = {"padded": True} if len(texts) > 1 else {}
        self.texts = [text.model_copy(update=several) if text.padded is None else text for text in texts]
        self.join, self._no_text = join, no_text

    def check(self) -> None:
        """Raises ValueError for settings that contradict each other."""
        first, *_ = self.texts
        early = [text for number, text in enumerate(self.texts) if self._is_early(number)]
        if any(text.live != first.live for text in self.texts):
            raise ValueError(
                "data.encode.text: live is true for some encoders and false for others. Give all the same value"
            )
        if self.join == "sd3" and len(self.texts) < 2:
            raise ValueError("data.encode.join = sd3 needs two encoders or more in data.encode.text, T5 as the last")
        if any(text.padded is False or text.max_tokens != early[0].max_tokens for text in early):
            raise ValueError(
                f"data.encode.join = {self.join} puts the states of CLIP encoders side by side: give them one "
                "max_tokens, and leave padded out"
            )

    @property
    def is_live(self) -> bool:
        return self.texts[0].live

    @property
    def length(self) -> int:
        """The number of states of a text."""
        before = self.texts[0].max_tokens if self.join == "sd3" else 0
        return before + self.texts[-1].max_tokens

    @cached_property
    def no_text(self) -> NoText:
        """How the empty text is made: as the recipe says, or as in the encoders' own pipeline."""
        if self._no_text is not None:
            return self._no_text
        if self.join != "sdxl":
            return "encoded"
        # As in StableDiffusionXLPipeline: zeros unless its setting says otherwise.
        index = self.texts[0].folder().parent / "model_index.json"
        settings = json.loads(index.read_text(encoding="utf-8")) if index.is_file() else {}
        return "zeros" if settings.get("force_zeros_for_empty_prompt", True) else "encoded"

    def empty_tokens(self) -> np.ndarray | None:
        """(1, tokens of all encoders): the tokenized empty text; None: its states are zeros."""
        return None if self.no_text == "zeros" else self.tokens([""]).ids

    def empty_state(self) -> TextState:
        """The encoded empty text."""
        [found] = self.states([""])
        if self.no_text == "encoded":
            return found
        states = np.zeros((self.length, found.states.shape[1]), dtype=np.float32)
        return TextState(states, None if found.pooled is None else np.zeros_like(found.pooled), is_cut=False)

    def families(self) -> dict[str, Family]:
        """Each encoder as a model that is sharded over ranks."""
        from fullshard.families.diffusion.models.text_encoder import TextEncoder

        return {
            f"text[{number}]": TextEncoder(encoder=text, early=self._is_early(number), join=self.join)
            for number, text in enumerate(self.texts)
        }

    def _is_early(self, number: int) -> bool:
        """Whether states come from the second-to-last layer, as for CLIP in SDXL and SD3."""
        return self.join == "sdxl" or (self.join == "sd3" and number < len(self.texts) - 1)

    @cached_property
    def _tokenizers(self) -> list[Any]:
        return [text.tokenizer() for text in self.texts]

    @cached_property
    def _encoders(self) -> list[Any]:
        return [text.open(early=self._is_early(number), join=self.join) for number, text in enumerate(self.texts)]

    def tokens(self, written: Sequence[str]) -> Tokens:
        each = [self._of_one(*pair, written) for pair in zip(self.texts, self._tokenizers, strict=True)]
        return Tokens(np.concatenate([found.ids for found in each], axis=1), each[-1].is_cut)

    def _of_one(self, text: Texts, tokenizer: Any, written: Sequence[str]) -> Tokens:
        ids = np.full((len(written), text.max_tokens), NO_TOKEN, dtype=np.int64)
        if text.lowercase if text.lowercase is not None else not text.is_padded:
            written = [one.lower().strip() for one in written]
        # One token over the limit shows which texts are too long.
        whole = tokenizer(list(written), truncation=True, max_length=text.max_tokens + 1)["input_ids"]
        cut = tokenizer(list(written), truncation=True, max_length=text.max_tokens)["input_ids"]
        for row, found in enumerate(cut):
            ids[row, : len(found)] = found
        return Tokens(ids, np.array([len(found) > text.max_tokens for found in whole]))

    def states(self, written: Sequence[str]) -> Iterator[TextState]:
        """In order. The encoders stay open as long as this object."""
        import torch

        from fullshard.families.diffusion.text.encoder_model import encoded

        device: torch.device = self._encoders[-1].device
        tokens = self.tokens(written)
        at_once = _AT_ONCE[device.type]
        for rows in np.split(np.arange(len(written)), range(at_once, len(written), at_once)):
            found = {
                name: part.cpu().numpy()
                for name, part in encoded(self._encoders, torch.from_numpy(tokens.ids[rows]).to(device)).items()
            }
            for index, row in enumerate(rows):
                states = found["states"][index, : found["mask"][index].sum()]
                pooled = found["pooled"][index] if "pooled" in found else None
                yield TextState(states, pooled, bool(tokens.is_cut[row]))
