"""The processor of a multimodal model: Transformers' own class, without the parts that cannot be loaded here.

Transformers' video processors need torchvision, and many image models have one beside their image processor. Must not
know records, batches or ranks.
"""

from __future__ import annotations

import functools
import inspect
import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np

from fullshard.config.part import did_you_mean
from fullshard.errors import DataError, RecipeError
from fullshard.hf.hub import read_config

_KEPT = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
_PLACEHOLDERS = ("image_token", "boi_token", "image_placeholder")
"""Attributes of processors that name the text for an image in a chat template."""
_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"}
_OPTIONAL = ("torchvision", "torchaudio", "num2words", "librosa")
"""Packages that parts of processors need."""
_BETWEEN = "\x1f"
"""Keeps the texts of several images apart; no template writes it."""


@dataclass
class ImageTextProcessor:
    """Texts and images as the model takes them."""

    whole: Any
    """Transformers' processor."""
    kept: dict[str, Any]
    """Settings in the files of the model's folder, by file; exported unchanged, except for the image processor's."""

    def __post_init__(self) -> None:
        if isinstance(self.whole.chat_template, str):
            # The tokenizer's own may know no images.
            self.tokenizer.chat_template = self.whole.chat_template
        self._texts: dict[tuple[tuple[int, int], ...], _ImageTexts] = {}
        self._rope: Any = None
        self.takes_types = False

    @property
    def tokenizer(self) -> Any:
        return self.whole.tokenizer

    @property
    def image_processor(self) -> Any:
        return self.whole.image_processor

    @functools.cached_property
    def image_token_id(self) -> int:
        """The token that the model replaces by a patch of an image: the special token that repeats."""
        tokens = self._tokens(self.image_texts([(256, 256)])[0])
        return Counter(t for t in tokens if t in self.tokenizer.added_tokens_decoder).most_common(1)[0][0]

    @functools.cached_property
    def placeholder(self) -> str:
        """What a chat template writes for an image."""
        named = [getattr(self.whole, name, None) for name in _PLACEHOLDERS]
        for text in dict.fromkeys(filter(None, named)):
            try:
                if len(self._expanded(str(text), [(256, 256)])[0]) > len(str(text)):
                    return str(text)
            except (ValueError, IndexError, StopIteration):
                continue
        raise RecipeError(
            f"model: {type(self.whole).__name__} has no placeholder for images that fullshard knows, so images cannot "
            "be placed among the tokens. This model is not supported."
        )

    @functools.cached_property
    def takes_suffix(self) -> bool:
        """Whether it lays out question and answer as prefix and suffix, as PaliGemma's does, without a chat
        template."""
        call = inspect.signature(type(self.whole).__call__).parameters.get("kwargs")
        # Transformers names the settings of a call in one of these places, by version.
        kinds = [getattr(self.whole, "valid_processor_kwargs", None), *get_args(call.annotation if call else None)]
        texts = [get_type_hints(kind).get("text_kwargs") for kind in kinds if isinstance(kind, type)]
        return any("suffix" in getattr(text, "__annotations__", {}) for text in texts)

    @property
    def text_type(self) -> int:
        """The token type of generated tokens and of padding. A prefix has type 0, and would see them all."""
        return int(self.takes_suffix)

    def image_texts(self, sizes: Sequence[tuple[int, int]]) -> list[str]:
        """The text of each image of a sample before it is tokenized; sizes are (width, height)."""
        return self._laid_out(tuple(sizes)).texts

    def prefix(self, question: str, sizes: Sequence[tuple[int, int]]) -> str:
        """Images and question as a processor that takes a suffix writes them."""
        found = self._laid_out(tuple(sizes))
        return "".join(found.texts) + question + found.after

    def _laid_out(self, sizes: tuple[tuple[int, int], ...]) -> _ImageTexts:
        """Texts and grids follow from the sizes, so blank images give the same."""
        if sizes not in self._texts:
            marks = [self.placeholder] * len(sizes) + [""] * self.takes_suffix
            text, grid = self._expanded(_BETWEEN.join(marks), sizes)
            found = text.split(_BETWEEN)
            if len(found) != len(marks):
                raise DataError(f"{type(self.whole).__name__} mixes up the texts of {len(sizes)} images in one sample.")
            self._texts[sizes] = _ImageTexts(found[: len(sizes)], "".join(found[len(sizes) :]), grid)
        return self._texts[sizes]

    def features(self, images: Sequence[Any]) -> dict[str, Any]:
        """The tensors of the images of one sample, as the model takes them."""
        text = _BETWEEN.join([self.placeholder] * len(images))
        found = self.processed(text, images)
        return {name: value for name, value in found.items() if name not in _OF_TEXT}

    def positions(self, ids: np.ndarray, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
        """(tokens, 3): time, height and width of each token, for a model with M-RoPE; (tokens, 0) for others."""
        if self._rope is None:
            return np.empty((len(ids), 0), dtype=np.int32)
        import torch

        row = torch.from_numpy(ids.astype(np.int64))[None]
        grid = self._laid_out(tuple(sizes)).grid if sizes else None
        found, _ = self._rope(row, mm_token_type_ids=(row == self.image_token_id).int(), image_grid_thw=grid)
        return np.ascontiguousarray(found[:, 0].T.numpy().astype(np.int32))

    def follow(self, config: Any) -> None:
        """Takes from the model's class how it counts positions, and whether it takes token types."""
        base = _base_class(config)
        self.takes_types = "token_type_ids" in inspect.signature(base.forward).parameters
        if hasattr(base, "get_rope_index"):
            from torch import nn

            # The method only reads the config, so the module needs no weights.
            hollow = base.__new__(base)
            nn.Module.__init__(hollow)
            hollow.config = config
            self._rope = hollow.get_rope_index

    def limit(self, least: int | None, most: int | None) -> None:
        """Bounds the pixels of an image; exported with the processor."""
        if least is None and most is None:
            return
        size = getattr(self.image_processor, "size", None)
        sizes = dict(size) if size is not None else {}
        if not {"shortest_edge", "longest_edge"} <= {k for k, v in sizes.items() if v is not None}:
            raise RecipeError(
                f"model.min_pixels, model.max_pixels: {type(self.image_processor).__name__} makes every image the same "
                "size. Leave them out, or change its settings with model.image_processor."
            )
        self.image_processor.size = {
            "shortest_edge": least or sizes["shortest_edge"],
            "longest_edge": most or sizes["longest_edge"],
        }

    def change(self, settings: Mapping[str, Any]) -> None:
        """Changes settings of the image processor; exported with it."""
        known = {key for key in self.image_processor.to_dict() if not key.startswith("_")}
        for key, value in settings.items():
            if key not in known:
                raise RecipeError(
                    f"model.image_processor.{key} is not a setting of {type(self.image_processor).__name__}"
                    f"{did_you_mean(key, sorted(known))}. Known: {', '.join(sorted(known))}."
                )
            setattr(self.image_processor, key, value)

    def _expanded(self, text: str, sizes: Sequence[tuple[int, int]]) -> tuple[str, Any]:
        """The text that Transformers' processor hands to its tokenizer for blank images of these sizes, and their
        grids."""
        from PIL import Image

        recorder = Recorder(self.tokenizer)
        self.whole.tokenizer = recorder
        try:
            found = self.processed(text, [Image.new("RGB", size) for size in sizes])
        finally:
            self.whole.tokenizer = recorder.tokenizer
        return recorder.text, found.get("image_grid_thw")

    def processed(self, text: str, images: Sequence[Any], **settings: Any) -> Any:
        """The output of Transformers' processor for one text and its images."""
        with warnings.catch_warnings():
            # PaliGemma's makes a NumPy array of a tensor.
            warnings.simplefilter("ignore", DeprecationWarning)
            return self.whole(text=[text], images=[list(images)], return_tensors="pt", **settings)

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def to_json_string(self) -> str:
        """Everything that decides the layout of inputs, except the tokenizer."""
        images = {key: value for key, value in self.image_processor.to_dict().items() if not key.startswith("_")}
        scalars = {k: v for k, v in vars(self.whole).items() if isinstance(v, (str, int, float, bool, type(None)))}
        return json.dumps([images, scalars], sort_keys=True, default=str)

    def save_pretrained(self, folder: Any) -> None:
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)
        if self.kept:
            for name, settings in self.kept.items():
                mine = {"image_processor": self.image_processor.to_dict()} if "image_processor" in settings else {}
                if name != "preprocessor_config.json":
                    (Path(folder) / name).write_text(json.dumps({**settings, **mine}, indent=2, default=str) + "\n")
        else:
            settings = {"processor_class": type(self.whole).__name__, **_own_settings(self.whole)}
            (Path(folder) / "processor_config.json").write_text(json.dumps(settings, indent=2, default=str) + "\n")


@dataclass(frozen=True)
class _ImageTexts:
    """What a processor writes for the images of a sample."""

    texts: list[str]
    after: str
    """What it writes after a question; empty for a processor without prefix and suffix."""
    grid: Any
    """The patches of each image, for a processor that counts them."""


class Recorder:
    """A tokenizer that records the text of the last call."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.text = tokenizer, ""

    def __call__(self, text: Any, **settings: Any) -> Any:
        self.text = text if isinstance(text, str) else text[0]
        return self.tokenizer(text, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def has_processor(folder: Path) -> bool:
    """Whether a folder has the processor of a multimodal model."""
    return any((folder / name).is_file() for name in _KEPT)


def takes_audio(folder: Path) -> bool:
    """Whether a folder is of a model that reads audio: by its config, or by the processor beside an adapter."""
    if (config := read_config(folder)) is not None:
        return bool(config.get("audio_config")) or "num_mel_bins" in config
    kept = "".join((folder / name).read_text(encoding="utf-8") for name in _KEPT if (folder / name).is_file())
    return '"feature_extractor' in kept and '"image_processor' not in kept


def _base_class(config: Any) -> Any:
    """Transformers' class of the model without its head."""
    from transformers import AutoModel

    return AutoModel._model_mapping[type(config)]


def assemble(class_name: str, parts: dict[str, Any], settings: dict[str, Any]) -> Any:
    """A processor of this class from its loaded parts; parts that are missing, such as a video processor, stay None."""
    import transformers

    found: Any = getattr(transformers, class_name, None)
    if found is None:
        raise RecipeError(f"model: Transformers {transformers.__version__} has no {class_name}. Upgrade transformers.")

    class Assembled(found):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return list(found.get_attributes())

    Assembled.__name__ = Assembled.__qualname__ = class_name
    given = {name: parts.get(name) for name in found.get_attributes()}
    known = inspect.signature(found.__init__).parameters
    try:
        return Assembled(**given, **{name: value for name, value in settings.items() if name in known})
    except ImportError as error:
        raise RecipeError(f"model: {class_name} cannot be loaded{_why(error)}") from error


def load_processor(folder: Path, tokenizer: Any, *, model_type: str, trust_remote_code: bool, where: str) -> Any:
    """The processor of a model's folder."""
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    kept = {name: json.loads((folder / name).read_text()) for name in _KEPT if (folder / name).is_file()}
    if not kept:
        raise RecipeError(
            f"{where}: {folder} has no image processor (no preprocessor_config.json or processor_config.json). Give a "
            "folder with the processor of a vision-language model."
        )
    try:
        images = AutoImageProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # of any kind
        raise RecipeError(f"{where}: the image processor in {folder} cannot be loaded{_why(error)}") from error
    settings = dict(kept.get("processor_config.json", {}))
    named = settings.get("processor_class") or kept.get("preprocessor_config.json", {}).get("processor_class")
    template = folder / "chat_template.jinja"
    settings["chat_template"] = template.read_text() if template.is_file() else _old_template(folder)
    class_name = PROCESSOR_MAPPING_NAMES.get(model_type) or named
    if class_name is None:
        raise RecipeError(f"{where}: Transformers knows no processor for models of type {model_type}.")
    whole = assemble(str(class_name), {"image_processor": images, "tokenizer": tokenizer}, settings)
    return ImageTextProcessor(whole, kept)


def _why(error: Exception) -> str:
    """Why something cannot be loaded, with the install line of a package that is missing."""
    missing = next((name for name in _OPTIONAL if name in str(error).lower()), None)
    if missing and find_spec(missing) is None:
        return f": {missing} is not installed. Install it with: pip install {missing}"
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return f" ({reason}). Give a folder whose processor Transformers loads, or use another model."


def _old_template(folder: Path) -> str | None:
    file = folder / "chat_template.json"
    return json.loads(file.read_text())["chat_template"] if file.is_file() else None


def _own_settings(whole: Any) -> dict[str, Any]:
    """The settings of a processor beside its parts."""
    known = inspect.signature(type(whole).__mro__[1]).parameters
    parts = {*type(whole).get_attributes(), "chat_template"}
    return {name: getattr(whole, name) for name in known if name not in parts and hasattr(whole, name)}


__all__ = ["ImageTextProcessor", "Recorder", "assemble", "has_processor", "load_processor", "takes_audio"]
