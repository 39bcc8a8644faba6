"""Finds a model on disk: a folder, or a hub name that is (or gets) downloaded into the hub's own cache.

Must not know configs, modules or ranks.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from fullshard.errors import RecipeError, SetupError, first_line

_SETTINGS = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
_WEIGHTS = ["*.safetensors", "adapter_model.bin", "[0-9]_Dense*/pytorch_model.bin"]
_UNWANTED = [
    *("original/*", "consolidated*", "onnx/*", "openvino/*", "*.gguf"),
    # Subfolders, except those of sentence-transformers' modules (0_Transformer, 2_Dense).
    *("[!0-9]*/*.safetensors", "[0-9]/*.safetensors", "[0-9][!_]*/*.safetensors"),
]


def local_folder(name: str, *, revision: str | None, where: str) -> Path:
    """The folder of a model that is on disk already; never touches the network."""
    folder = _in_package(name, where=where) or Path(os.path.expanduser(name))
    if os.path.isdir(folder):
        return folder.resolve()
    _refuse_paths(name, where=where)
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
    except Exception as error:
        raise SetupError(
            f"{where} = {name!r} is not a folder here, and not in the hub's cache ({first_line(error)}). "
            f"Fetch it on a machine with network access: hf download {name}"
        ) from error


def read_config(folder: Path) -> dict[str, Any] | None:
    """The config.json of a folder; None if it is missing or not JSON."""
    try:
        found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def is_transformers_folder(folder: Path) -> bool:
    """Whether a folder holds a plain model of Transformers or a PEFT adapter, not one of a library built on it."""
    if any((folder / index).is_file() for index in ("modules.json", "model_index.json")):
        return False
    config = read_config(folder)
    return (folder / "adapter_config.json").is_file() if config is None else "_class_name" not in config


def lasting(name: str, *, folder: Path) -> str:
    """The name by which other libraries find a model from anywhere: a hub name unchanged; anything that names a local
    folder (a relative path, package:NAME/FOLDER) as an absolute path."""
    local = name.startswith("package:") or os.path.isdir(os.path.expanduser(name))
    return str(folder.resolve()) if local else name


def fetch(name: str, *, revision: str | None, code: bool, weights: bool, where: str) -> Path:
    """The folder of a model, downloaded if it is a hub name that is not on disk yet."""
    folder = _in_package(name, where=where) or Path(os.path.expanduser(name))
    if os.path.isdir(folder):
        return folder.resolve()
    _refuse_paths(name, where=where)
    import huggingface_hub

    wanted = [*_SETTINGS, *(_WEIGHTS if weights else []), *(["*.py"] if code else [])]
    try:
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=_UNWANTED)
        )
    except Exception as error:
        raise _explain(error, name, revision=revision, where=where) from error


def _in_package(name: str, *, where: str) -> Path | None:
    """The folder that `package:NAME/FOLDER` names, inside an installed Python package."""
    if not name.startswith("package:"):
        return None
    package, _, inside = name.removeprefix("package:").partition("/")
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise SetupError(
            f"{where} = {name!r}: the Python package {package!r} is not installed. Install it: "
            f"pip install {package.replace('_', '-')}"
        )
    folder = Path(found.submodule_search_locations[0]) / inside
    if not folder.is_dir():
        raise RecipeError(f"{where} = {name!r}: the package {package!r} has no folder {inside!r}. Check the spelling.")
    return folder


def _refuse_paths(name: str, *, where: str) -> None:
    """Raises RecipeError for a missing path, which must not become a request to the hub."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise RecipeError(
            f"{where} = {name!r}: there is no such folder. Check the path; a hub name looks like owner/model."
        )


def _explain(error: Exception, name: str, *, revision: str | None, where: str) -> Exception:
    """Turns an error of the hub into a RecipeError that says what to do."""
    from huggingface_hub import errors

    cases: list[tuple[Any, str]] = [
        (errors.GatedRepoError, "is gated. Accept its terms on its hub page, then log in with: hf auth login"),
        (errors.RevisionNotFoundError, f"has no revision {revision!r}. Check model.revision"),
        (errors.HFValidationError, "is not a folder here and not a hub name. Check the path or the spelling"),
        (
            errors.RepositoryNotFoundError,
            "is not a folder here and not on the hub (or private). Check the spelling, or log in with: hf auth login",
        ),
    ]
    for kind, words in cases:
        if isinstance(error, kind):
            return RecipeError(f"{where} = {name!r} {words}.")
    return SetupError(
        f"{where} = {name!r} is not a folder here and could not be downloaded from the hub ({first_line(error)}). "
        f"Fetch it on a machine with network access (hf download {name}), or give a local folder."
    )
