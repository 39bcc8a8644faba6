"""A PEFT adapter folder to continue training from: its settings, its base model, its tensors by parameter name.

Only settings that can be continued exactly are accepted; any other is an error that names it. Must not know recipes,
ranks or the base model's files.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from torch import nn

from fullshard.errors import CheckpointError, RecipeError
from fullshard.hf.adapters.edits import ADAPTER, inject, is_adapter
from fullshard.hf.weights.safetensors_folder import Stored, open_files
from fullshard.hf.weights.state_file import open_pickle
from fullshard.hf.weights.stored_weights import NamedWeights, adapter_shapes

CONFIG = "adapter_config.json"
_WHOLE = ("model.safetensors", "model.safetensors.index.json")
_TAKEN = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "target_modules", "exclude_modules", "target_parameters", "lora_alpha", "lora_dropout"),
    *("fan_in_fan_out", "use_rslora", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern"),
    *("alpha_pattern", "runtime_config"),
}
"""Settings of peft's LoraConfig that may differ from their default."""
_STARTS = (True, False, "gaussian", "orthogonal")
"""Values of init_lora_weights that do not change the base model."""
_MERGE = (
    "Merge it into its base with peft (PeftModel.merge_and_unload, then save_pretrained) and train that folder, or "
    "start new adapters with model.lora"
)


def is_adapter_folder(folder: Path, *, base_named: bool) -> bool:
    """Whether a folder is an adapter, not a model; if it is both, `model.base` decides."""
    if not (folder / CONFIG).is_file():
        return False
    if any((folder / name).is_file() for name in _WHOLE) and not base_named:
        raise RecipeError(
            f"model.path: {folder} holds a whole model and a PEFT adapter beside it. To continue the adapter, name "
            f"its base in model.base; to train the model, remove {CONFIG} from the folder."
        )
    return True


def named_base(folder: Path) -> tuple[str, str | None]:
    """The base model that the adapter names, and its revision on the hub; raises RecipeError if it has moved."""
    settings = _settings(folder)
    name = settings.get("base_model_name_or_path")
    local = isinstance(name, str) and (Path(name).is_absolute() or name.startswith(".") or name.count("/") > 1)
    if not name or (local and not Path(name).is_dir()):
        found = f"base_model_name_or_path = {name!r}, but there is no such folder" if name else "no base model named"
        raise RecipeError(f"{folder / CONFIG}: {found}. Say where the base model is: model.base = FOLDER or hub name.")
    return str(name), settings.get("revision")


def _settings(folder: Path) -> dict[str, Any]:
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read ({error}). Save the adapter again.") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{folder / CONFIG} holds no settings. Save the adapter again.")
    return settings


def read_config(folder: Path) -> Any:
    """The adapter's own peft config; raises RecipeError for settings that cannot be trained here."""
    from peft import LoraConfig

    settings = _settings(folder)
    where, kind = folder / CONFIG, str(settings.get("peft_type")).upper()
    if kind != "LORA":
        raise RecipeError(f"{where}: peft_type = {kind}, but only LORA adapters can be trained further. {_MERGE}.")
    if settings.get("task_type") not in (None, "CAUSAL_LM", "FEATURE_EXTRACTION"):
        raise RecipeError(
            f"{where}: task_type = {settings['task_type']}, but only language models (CAUSAL_LM) and embedding "
            "models (FEATURE_EXTRACTION) can be trained."
        )
    settings.pop("runtime_config", None)
    usual = {f.name: getattr(LoraConfig(), f.name) for f in dataclasses.fields(LoraConfig)}
    if unknown := [key for key, value in settings.items() if key not in usual and value not in (None, False, [], {})]:
        raise RecipeError(
            f"{where}: the installed peft does not know {', '.join(sorted(unknown))}; the adapter was written by peft "
            f"{settings.get('peft_version', 'of a newer version')}. Install that version: pip install -U peft"
        )
    empty: tuple[Any, ...] = (None, [], {})
    untrained = [
        f"{key} = {json.dumps(value)}"
        for key, value in settings.items()
        if key in usual and key not in _TAKEN and value != usual[key] and not (value in empty and usual[key] in empty)
    ]
    if settings.get("init_lora_weights", True) not in _STARTS:
        # These change the base model at initialisation, and the stored tensors belong to the changed base.
        untrained.append(f"init_lora_weights = {json.dumps(settings['init_lora_weights'])}")
    if untrained:
        raise RecipeError(f"{where}: {', '.join(untrained)} cannot be trained here. {_MERGE}.")
    return _config(settings, usual, where)


def _config(settings: dict[str, Any], usual: dict[str, Any], where: Path) -> Any:
    from peft import LoraConfig

    known = {key: value for key, value in settings.items() if key in usual}
    # Values are loaded, never initialised.
    task = settings.get("task_type") or "CAUSAL_LM"
    changed = {"init_lora_weights": True, "inference_mode": False, "task_type": task}
    try:
        return LoraConfig(**{**known, **changed})
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{where}: peft refuses these settings ({error}). Save the adapter again.") from error


def add_stored(module: nn.Module, folder: Path, *, base: str, revision: str | None) -> None:
    """Adds the folder's adapters in place, on meta, with the current name of the base."""
    config = read_config(folder)
    config.base_model_name_or_path, config.revision = base, revision
    try:
        inject(module, config)
    except ValueError as error:
        raise RecipeError(
            f"model.path: the adapter in {folder} does not fit its base {base} ({type(module).__name__}): "
            f"{str(error).splitlines()[0].rstrip('.')}. Name the model it was trained on in model.base."
        ) from error


def adapter_weights(folder: Path, module: nn.Module) -> NamedWeights:
    """The folder's tensors by parameter name."""
    return NamedWeights(
        _open(folder),
        stored_names(module),
        adapter_shapes(module),
        what=f"{folder} does not hold the adapters of this model",
        advice="Check that the adapter was trained on this base model (model.base names another one).",
    )


def stored_names(module: nn.Module) -> dict[str, str]:
    """The module's adapter parameters and the names under which peft stores them."""
    from peft import get_peft_model_state_dict

    parameters = {name: p for name, p in module.named_parameters() if is_adapter(name)}
    stored = get_peft_model_state_dict(
        module, state_dict=dict(parameters), adapter_name=ADAPTER, save_embedding_layers=False
    )
    found = {id(tensor): f"base_model.model.{name}" for name, tensor in stored.items()}
    return {name: found[id(parameter)] for name, parameter in parameters.items() if id(parameter) in found}


def _open(folder: Path) -> Stored:
    safe, pickled = folder / "adapter_model.safetensors", folder / "adapter_model.bin"
    if safe.is_file():
        return open_files([safe])
    if pickled.is_file():
        return open_pickle(pickled)
    raise CheckpointError(f"{folder} holds neither {safe.name} nor {pickled.name}. Fetch or save the adapter again.")
