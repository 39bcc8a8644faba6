"""What a fullshard checkpoint records about its model, for a recipe that gives only `model.from`.

Reads JSON only, so that a recipe can be completed without torch. Must not know modules, tensors or ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError, RecipeError

FILES = (".pt", ".pth", ".bin", ".safetensors")
"""Suffixes of a state file; anything else that `model.from` names is a checkpoint."""
_STRUCTURE = (
    *("path", "base", "architecture", "size", "overrides", "revision", "lora", "resize_embedding"),
    *("pooling", "normalize"),
)
_NOT_BESIDE = ("base", "size", "overrides", "revision")


def is_file(start: str) -> bool:
    """Whether `model.from` names a state file, not a checkpoint folder."""
    return start.endswith(FILES)


def checkpoint_of(start: str) -> Path:
    """The checkpoint that `model.from` names: a checkpoint folder, a run folder, `best` or `last`, a URL."""
    from fullshard.checkpoint import folder as files

    try:
        return files.named(start if "://" in start else Path(start).expanduser())
    except CheckpointError as error:
        raise RecipeError(f"model.from = {start!r}: {_meant(Path(start).expanduser()) or error}") from error


def _meant(folder: Path) -> str | None:
    """The right key for a folder that is not a checkpoint."""
    for name, what in (("adapter_config.json", "a PEFT adapter"), ("config.json", "a model folder")):
        if (folder / name).is_file():
            return f"this is {what}, not a checkpoint. Name it in model.path."
    return None


def refuse_checkpoint(folder: Path, named: str) -> None:
    """Raises RecipeError for a checkpoint or run in `model.path`: it belongs in `model.from`."""
    if (folder / "config.json").is_file():
        return
    if (folder / "manifest.json").is_file() or any(folder.glob("checkpoint-*/manifest.json")):
        raise RecipeError(
            f"model.path = {named!r} holds fullshard checkpoints, not a model. Name it in model.from instead, or use "
            "the model/ folder of the run."
        )


def recorded_model(start: str) -> dict[str, Any] | None:
    """The `model` section of the run that wrote the checkpoint; None if it is not recorded."""
    from fullshard.checkpoint import folder as files

    recipe = files.read_state(checkpoint_of(start)).get("recipe")
    model = recipe.get("model") if isinstance(recipe, Mapping) else None
    return dict(model) if isinstance(model, Mapping) else None


def recorded_groups(start: str) -> list[dict[str, Any]]:
    """`optimizer.groups` of the run that wrote the checkpoint."""
    from fullshard.checkpoint import folder as files

    recipe = files.read_state(checkpoint_of(start)).get("recipe") or {}
    return list((recipe.get("optimizer") or {}).get("groups") or [])


def completed(values: Mapping[str, Any], *, kinds: tuple[str, ...] = ("hf",)) -> dict[str, Any]:
    """The settings of a model, with structure, LoRA and tokenizer of the checkpoint that `from` names alone, which must
    hold a model of one of `kinds`.

    The recipe's own settings win. Permission to run a model's own code is never taken from a checkpoint."""
    start = values.get("from", values.get("start"))
    if not isinstance(start, str) or values.get("path") is not None or values.get("architecture") is not None:
        return dict(values)
    if is_file(start):
        raise ValueError(
            f"model.from = {start!r} holds only tensors. Set model.path (a folder with its config) or "
            "model.architecture as well"
        )
    try:
        return _complete(dict(values), start, kinds)
    except CheckpointError as error:
        raise ValueError(f"model.from = {start!r}: {str(error).rstrip('.')}") from error
    except RecipeError as error:
        raise ValueError(str(error).rstrip(".")) from error


def _complete(values: dict[str, Any], start: str, kinds: tuple[str, ...]) -> dict[str, Any]:
    found = recorded_model(start)
    if found is None or found.get("kind", "hf") not in kinds:
        other = f"a model of kind {found.get('kind', 'hf')!r}" if found else "no settings of its model"
        raise RecipeError(
            f"model.from = {start!r}: the checkpoint holds {other}. Set model.path or model.architecture as well."
        )
    beside = [key for key in _NOT_BESIDE if values.get(key)]
    if beside:
        raise RecipeError(
            f"model.{beside[0]} goes with model.path or model.architecture; model.from = {start!r} alone already "
            "defines it. Leave it out, or set model.path or model.architecture as well."
        )
    if values.get("lora") and (found.get("lora") or found.get("base")):
        raise RecipeError(
            f"model.lora: the checkpoint model.from = {start!r} has adapters and their settings. Leave model.lora "
            "out to train them further, or merge them first (fullshard export) and add new ones to the merged model."
        )
    taken = {key: found[key] for key in _STRUCTURE if found.get(key) is not None and values.get(key) in (None, {})}
    tokenizer = values.get("tokenizer") or _tokenizer(start, found.get("tokenizer"))
    return {**values, **taken, **({"tokenizer": tokenizer} if tokenizer else {})}


def _tokenizer(start: str, recorded: Any) -> Any:
    """The tokenizer saved in the checkpoint; else the one its recipe names, unless it was trained by that run."""
    from fullshard.checkpoint import folder as files

    # As typed, if that leads there: settings must not change when a run continues and its `last` moves.
    typed = [f"{start}/{files.PROCESSOR}", f"{start}/last/{files.PROCESSOR}"]
    for folder in [*(p for p in typed if Path(p).is_dir()), str(checkpoint_of(start) / files.PROCESSOR)]:
        if files.place(folder).exists():
            return {"path": folder}
    if isinstance(recorded, Mapping) and recorded.get("train"):
        raise RecipeError(
            f"model.from = {start!r}: its run trained a tokenizer, and the checkpoint does not hold it. "
            "Name it in model.tokenizer."
        )
    return recorded


def kept_tokenizer(start: str) -> Path | None:
    """The tokenizer in a local checkpoint; None for a state file, or without one."""
    from fullshard.checkpoint import folder as files

    if is_file(start) or "://" in start:
        return None
    folder = checkpoint_of(start) / files.PROCESSOR
    return folder if folder.is_dir() else None


def copied(url: str, *, cache: Path) -> Path:
    """A small remote folder (a tokenizer) as a local copy, made once."""
    from filelock import FileLock

    from fullshard.checkpoint.folder import place

    target = cache / "processors" / hashlib.sha256(url.encode()).hexdigest()[:16]
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.is_dir():
            part = target.with_name(f"{target.name}.part")
            for file in place(url).rglob("*"):
                if file.is_file():
                    copy = part / str(file).removeprefix(str(place(url))).lstrip("/")
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    copy.write_bytes(file.read_bytes())
            part.rename(target)
    return target
