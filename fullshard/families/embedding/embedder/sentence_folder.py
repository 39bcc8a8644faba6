"""Folders of sentence-transformers: which backbone, how it is pooled, what follows, which prompts; read, and written at
the export.

Must not know modules, tensors, ranks or losses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.errors import RecipeError

_POOLING = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_OLD_POOLING = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}
_UNDERSTOOD = ("Transformer", "Pooling", "Dense", "Normalize")
ACTIVATIONS = {
    "Identity": "torch.nn.modules.linear.Identity",
    **{name: f"torch.nn.modules.activation.{name}" for name in ("Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")},
}
"""By the last part of their names; as sentence-transformers writes them."""
_DENSE_KEYS = {
    *("in_features", "out_features", "bias", "activation_function", "use_residual"),
    *("module_input_name", "module_output_name"),
}
AFTER_POOLING = "after_pooling"
"""The attribute of a module that holds its Dense layers."""


@dataclass(frozen=True)
class Layer:
    """A Dense module: one linear layer after pooling."""

    folder: Path
    """Where it is stored."""
    inputs: int
    outputs: int
    bias: bool
    activation: str
    """A key of ACTIVATIONS."""
    residual: bool
    """What goes in is added to what comes out, by a matrix where the two have other widths."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of its tensors, by their stored names."""
        matrix = (self.outputs, self.inputs)
        return {
            "linear.weight": matrix,
            **({"linear.bias": matrix[:1]} if self.bias else {}),
            **({"residual.weight": matrix} if self.residual and self.inputs != self.outputs else {}),
        }


def is_after_pooling(name: str) -> bool:
    """Whether a parameter belongs to a Dense layer."""
    return name.startswith(f"{AFTER_POOLING}.")


@dataclass(frozen=True)
class Sentence:
    """What a folder says beside the backbone itself."""

    backbone: str = ""
    """The folder of the backbone, inside."""
    pooling: str | None = None
    dense: tuple[Layer, ...] = ()
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
    dense = [place for kind, place in modules if kind == "Dense"]
    normalize = kinds[-1:] == ["Normalize"]
    if kinds != _kinds(dense=len(dense), normalize=normalize):
        raise RecipeError(
            f"model.path: {folder / 'modules.json'} lists {', '.join(kinds)}; what can be trained here is a "
            "Transformer, then its Pooling, then any number of Dense, then at most one Normalize. Choose another model."
        )
    config = folder / "config_sentence_transformers.json"
    prompts = _json(config).get("prompts") or {} if config.is_file() else {}
    # It is named after the backbone in folders of old: sentence_bert_config.json, sentence_roberta_config.json.
    texts = [_json(path) for path in sorted((folder / modules[0][1]).glob("sentence_*_config.json"))[:1]] or [{}]
    return Sentence(
        backbone=modules[0][1],
        pooling=_pooling(folder / modules[1][1] / "config.json"),
        dense=tuple(_layer(folder / place) for place in dense),
        normalize=normalize,
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


def _kinds(*, dense: int, normalize: bool) -> list[str]:
    return ["Transformer", "Pooling", *["Dense"] * dense, *(["Normalize"] if normalize else [])]


def _layer(folder: Path) -> Layer:
    """A Dense module's settings; one that is not known here would be trained as if it were not there."""
    path = folder / "config.json"
    settings = _json(path)
    widths = [settings.get(key) for key in ("in_features", "out_features")]
    activation = str(settings.get("activation_function", ACTIVATIONS["Tanh"]))
    name = activation.rpartition(".")[2] if activation.startswith("torch.nn.") else ""
    wrong = [f"{key} = {settings[key]!r}" for key in sorted(settings.keys() - _DENSE_KEYS)]
    if not all(isinstance(width, int) and width > 0 for width in widths):
        wrong.append(f"in_features, out_features = {widths[0]!r}, {widths[1]!r}")
    if name not in ACTIVATIONS:
        wrong.append(f"activation_function = {activation!r} (allowed: {', '.join(ACTIVATIONS.values())})")
    for key in ("module_input_name", "module_output_name"):
        if (settings.get(key) or "sentence_embedding") != "sentence_embedding":
            wrong.append(f"{key} = {settings[key]!r} (allowed: 'sentence_embedding')")
    if wrong:
        raise RecipeError(
            f"model.path: {path} has {', '.join(wrong)}, which cannot be trained here. Choose another model, or train "
            "the rest: take this module out of a copy's modules.json."
        )
    return Layer(
        folder,
        inputs=settings["in_features"],
        outputs=settings["out_features"],
        bias=bool(settings.get("bias", True)),
        activation=name,
        residual=bool(settings.get("use_residual")),
    )


def check_widths(layers: Sequence[Layer], width: int) -> None:
    """Each layer takes what the one before it gives, and the first what the backbone does."""
    for layer in layers:
        if layer.inputs != width:
            raise RecipeError(
                f"model.path: {layer.folder / 'config.json'} has in_features = {layer.inputs}, and what comes before "
                f"it gives {width} numbers. Save the model again, or choose another one."
            )
        width = layer.outputs


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
    dense: Sequence[Layer],
    normalize: bool,
    prompts: dict[str, str],
    template: dict[str, Any],
    images: bool = False,
) -> list[Path]:
    """Makes a folder of Transformers, or of an adapter, one that `SentenceTransformer(folder)` reads; gives the folders
    of the Dense modules, which still need their tensors. `width`: of the backbone."""
    kinds = _kinds(dense=len(dense), normalize=normalize)
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
    made = [folder / place for kind, place in zip(kinds, places, strict=True) if kind == "Dense"]
    for layer, own in zip(dense, made, strict=True):
        _write(own / "config.json", _settings(layer))
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
    return made


def _settings(layer: Layer) -> dict[str, Any]:
    """What every version of sentence-transformers knows; older ones stop at a key that is new to them."""
    return {
        "in_features": layer.inputs,
        "out_features": layer.outputs,
        "bias": layer.bias,
        "activation_function": ACTIVATIONS[layer.activation],
        **({"use_residual": True} if layer.residual else {}),
    }


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
