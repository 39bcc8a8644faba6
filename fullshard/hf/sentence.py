"""Folders of sentence-transformers: which backbone, how it is pooled, which prompts; read, and written at the export.

Must not know modules, ranks or losses.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.errors import RecipeError

_POOLING = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_OLD_POOLING = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}
_UNDERSTOOD = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class Sentence:
    """What a folder says beside the backbone itself."""

    backbone: str = ""
    """The folder of the backbone, inside."""
    pooling: str | None = None
    normalize: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    longest: int | None = None
    """Tokens at which texts are cut."""
    lower_case: bool = False
    """Whether texts are lowered before the tokenizer gets them."""
    template: dict[str, Any] = field(default_factory=dict)
    """What a chat template is called with, where texts go through one."""


def read_sentence(folder: Path) -> Sentence | None:
    """None where the folder is a plain one of Transformers."""
    if not (folder / "modules.json").is_file():
        return None
    modules = _modules(folder / "modules.json")
    kinds = [kind for kind, _ in modules]
    if other := [kind for kind in kinds if kind not in _UNDERSTOOD]:
        raise RecipeError(
            f"model.path: {folder / 'modules.json'} has {', '.join(other)}, and what can be trained here is "
            f"{', '.join(_UNDERSTOOD)}. Choose another model, or train the rest: take it out of a copy's modules.json."
        )
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise RecipeError(
            f"model.path: {folder / 'modules.json'} lists {', '.join(kinds)}; a Transformer and then its Pooling are "
            "needed."
        )
    config = folder / "config_sentence_transformers.json"
    prompts = _json(config).get("prompts") or {} if config.is_file() else {}
    # It is named after the backbone in folders of old: sentence_bert_config.json, sentence_roberta_config.json.
    texts = [_json(path) for path in sorted((folder / modules[0][1]).glob("sentence_*_config.json"))[:1]] or [{}]
    return Sentence(
        backbone=modules[0][1],
        pooling=_pooling(folder / modules[1][1] / "config.json"),
        normalize="Normalize" in kinds,
        prompts={name: text for name, text in prompts.items() if text},
        longest=texts[0].get("max_seq_length"),
        lower_case=bool(texts[0].get("do_lower_case")),
        template=(texts[0].get("processing_kwargs") or {}).get("chat_template") or {},
    )


def _modules(path: Path) -> list[tuple[str, str]]:
    """Kind and folder of each; what is not of sentence-transformers itself keeps its whole name."""
    found = []
    for entry in _json(path):
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str) or "path" not in entry:
            raise RecipeError(f"model.path: {path} does not list modules with type and path. Save the model again.")
        inside, _, kind = entry["type"].rpartition(".")
        found.append((kind if inside.startswith("sentence_transformers.") else entry["type"], entry["path"]))
    return found


def _pooling(path: Path) -> str:
    settings = _json(path)
    modes = [mode for mode in str(settings.get("pooling_mode") or "").split("+") if mode]
    modes = modes or [
        key.removeprefix("pooling_mode_") for key, on in settings.items() if key.startswith("pooling_mode_") and on
    ]
    names = [_POOLING.get(mode) or _OLD_POOLING.get(mode) for mode in modes]
    if len(names) != 1 or names[0] is None:
        raise RecipeError(
            f"model.path: {path} pools by {', '.join(modes) or 'nothing'}, and what can be trained here is one of "
            "mean, cls, lasttoken."
        )
    if settings.get("include_prompt") is False:
        raise RecipeError(
            f"model.path: {path} leaves prompts out of the mean (include_prompt = false), which is not supported. "
            "Train with prompts included: set it to true in a copy of the folder."
        )
    return names[0]


def write_sentence(
    folder: Path,
    *,
    width: int,
    longest: int | None,
    pooling: str,
    normalize: bool,
    prompts: dict[str, str],
    template: dict[str, Any],
    images: bool = False,
) -> None:
    """Makes a folder of Transformers, or of an adapter, one that `SentenceTransformer(folder)` reads."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    places = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds[1:], start=1))]
    modules = [
        # The names that every version of sentence-transformers knows.
        {"idx": index, "name": str(index), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, place) in enumerate(zip(kinds, places, strict=True))
    ]
    old = {f"pooling_mode_{key}": ours == pooling for key, ours in _OLD_POOLING.items()}
    _write(folder / "modules.json", modules)
    for place in places[1:]:
        (folder / place).mkdir(exist_ok=True)
    _write(folder / places[1] / "config.json", {"word_embedding_dimension": width, **old, "include_prompt": True})
    settings: dict[str, Any] = {"max_seq_length": longest, "do_lower_case": False}
    if images:
        # Without a word about it, sentence-transformers takes the model for one of texts, and uses no chat template.
        way = {"method": "forward", "method_output_name": "last_hidden_state"}
        settings["modality_config"] = {"text": way, "image": way, "message": {**way, "format": "structured"}}
        settings |= {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
        settings |= {"processing_kwargs": {"chat_template": template}} if template else {}
    _write(folder / "sentence_bert_config.json", settings)
    _write(
        folder / "config_sentence_transformers.json",
        {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )


def lower_texts(processor: Any) -> None:
    """Lets the tokenizer lower texts, and every copy of it that is saved."""
    from tokenizers.normalizers import Lowercase, Sequence

    backend = getattr(processor, "tokenizer", processor).backend_tokenizer
    backend.normalizer = Sequence([Lowercase(), *([backend.normalizer] if backend.normalizer else [])])


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"model.path: {path} cannot be read ({error}). Save the model again.") from error


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
