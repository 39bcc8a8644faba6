"""Folders of sentence-transformers: backbone, pooling, Dense modules and prompts; read, and written at export.

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
"""Class name -> the full name that sentence-transformers writes."""
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
    """Where its config and tensors are."""
    inputs: int
    outputs: int
    bias: bool
    activation: str
    """A key of ACTIVATIONS."""
    residual: bool
    """The input is added to the output, through a matrix if their widths differ."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of its tensors, by stored name."""
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
    """Everything in a folder but the backbone itself."""

    backbone: str = ""
    """The subfolder of the backbone."""
    pooling: str | None = None
    dense: tuple[Layer, ...] = ()
    normalize: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    longest: int | None = None
    """The maximum number of tokens of a text."""
    lower_case: bool = False
    """Whether texts are lowercased before they are tokenized."""
    template: dict[str, Any] = field(default_factory=dict)
    """The arguments of the chat template, if texts go through one."""


def read_sentence(folder: Path) -> Sentence | None:
    """None for a plain folder of Transformers."""
    if not (folder / "modules.json").is_file():
        return None
    modules = _modules(folder / "modules.json")
    kinds = [kind for kind, _ in modules]
    if other := [kind for kind in kinds if kind not in _UNDERSTOOD]:
        raise RecipeError(
            f"model.path: {folder / 'modules.json'} has {', '.join(other)}, which cannot be trained here (only "
            f"{', '.join(_UNDERSTOOD)}). Choose another model, or remove it from modules.json in a copy."
        )
    dense = [place for kind, place in modules if kind == "Dense"]
    normalize = kinds[-1:] == ["Normalize"]
    if kinds != _kinds(dense=len(dense), normalize=normalize):
        raise RecipeError(
            f"model.path: {folder / 'modules.json'} lists {', '.join(kinds)}; the order must be Transformer, "
            "Pooling, any number of Dense, at most one Normalize. Choose another model."
        )
    config = folder / "config_sentence_transformers.json"
    prompts = _json(config).get("prompts") or {} if config.is_file() else {}
    # Old folders name it after the backbone: sentence_bert_config.json, sentence_roberta_config.json.
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
    """Kind and folder of each; a class from outside sentence-transformers keeps its full name."""
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
    """A Dense module's settings. An unknown setting is an error: ignoring it would train another model."""
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
            f"model.path: {path} has {', '.join(wrong)}, which cannot be trained here. Choose another model, or "
            "remove this module from modules.json in a copy."
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
    """Each layer's input width is the output width before it."""
    for layer in layers:
        if layer.inputs != width:
            raise RecipeError(
                f"model.path: {layer.folder / 'config.json'} has in_features = {layer.inputs}, but its input has "
                f"width {width}. Save the model again, or choose another one."
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
            f"model.path: {path} pools by {', '.join(modes) or 'nothing'}; supported is one of mean, cls, lasttoken."
        )
    if settings.get("include_prompt") is False:
        raise RecipeError(
            f"model.path: {path} excludes prompts from the mean (include_prompt = false), which is not supported. "
            "To train with prompts included, set it to true in a copy of the folder."
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
    """Adds what `SentenceTransformer(folder)` reads to a folder of Transformers, or of an adapter. Returns the folders
    of the Dense modules, which still need their tensors. `width`: of the backbone."""
    kinds = _kinds(dense=len(dense), normalize=normalize)
    places = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds[1:], start=1))]
    modules = [
        # Names that every version of sentence-transformers knows.
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
        # Without these, sentence-transformers takes the model for a text model and uses no chat template.
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
    """Only keys that every version of sentence-transformers knows; older ones fail on a new key."""
    return {
        "in_features": layer.inputs,
        "out_features": layer.outputs,
        "bias": layer.bias,
        "activation_function": ACTIVATIONS[layer.activation],
        **({"use_residual": True} if layer.residual else {}),
    }


def lower_texts(processor: Any) -> None:
    """Makes the tokenizer, and every saved copy of it, lowercase texts."""
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
