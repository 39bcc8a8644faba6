"""One file with the whole state of a model, as torch or safetensors write it, read in rows.

The file stays on disk (memory-mapped), and a pickle in it may hold only tensors. Wrapper prefixes of DDP, FSDP and
compile are removed. Must not know modules, recipes or ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from fullshard.errors import CheckpointError, first_line
from fullshard.hf.weights.safetensors_folder import Stored, TensorEntry, open_files

_NESTED = ("model", "state_dict", "module")
_INNER = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What compile, FSDP1 and activation checkpointing put anywhere into a name."""
_SAVE = "Save tensors alone: torch.save(model.state_dict(), FILE), or safetensors.torch.save_file"


class Renamed(Stored):
    """Some tensors of another store, under other names (`names`: new name → stored name)."""

    def __init__(self, stored: Stored, names: Mapping[str, str]) -> None:
        super().__init__({new: stored[old] for new, old in names.items()})
        self._stored, self._names = stored, names

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self._stored.read(self._names[name], start, stop)


class _Mapped(Stored):
    """Tensors that torch mapped into memory: rows are read from disk on demand."""

    def __init__(self, file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__({name: TensorEntry(file, tuple(t.shape), t.dtype) for name, t in tensors.items()})
        self._tensors = tensors

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        tensor = self._tensors[name].detach()
        return (tensor[start:stop] if tensor.dim() else tensor).clone()


def open_state(file: Path) -> Stored:
    """The tensors of a file by the names of the bare module: flat, or under `model`, `state_dict` or `module`."""
    if not file.is_file():
        raise CheckpointError(f"{file}: there is no such file. Check the path.")
    stored = open_files([file]) if file.suffix == ".safetensors" else open_pickle(file)
    names = _bare_names(stored)
    twice = len(stored) - len(names)
    if twice:
        raise CheckpointError(
            f"{file}: without the prefixes of DDP and compile, {twice} of its {len(stored)} names are "
            f"duplicates. {_SAVE}, from the bare module."
        )
    return Renamed(stored, names)


def open_pickle(file: Path) -> Stored:
    """A file of torch.save, mapped into memory; anything but tensors is refused and never run."""
    content = _load(file)
    if isinstance(content, Mapping):
        nested = next((content[key] for key in _NESTED if isinstance(content.get(key), Mapping)), None)
        content = content if nested is None else nested
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(
            f"{file} holds {type(content).__name__}, but a mapping from name to tensor is needed, flat or under one of "
            f"{', '.join(_NESTED)}. {_SAVE}."
        )
    other = [str(name) for name, value in content.items() if type(value) not in (torch.Tensor, torch.nn.Parameter)]
    if other:
        raise CheckpointError(
            f"{file}: {len(other)} of its {len(content)} entries are not plain tensors: {', '.join(other[:5])}. "
            f"{_SAVE}."
        )
    return _Mapped(file, {str(name): tensor for name, tensor in content.items()})


def _load(file: Path) -> Any:
    try:
        return torch.load(file, weights_only=True, mmap=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds more than tensors ({_refused(error)}); loading it could run code, so it was not "
            f"loaded. {_SAVE}."
        ) from error
    except Exception as error:  # torch and zipfile raise many kinds of errors for a malformed file
        reason = first_line(error)
        if "mmap can only be used" in reason:
            reason = "it is not in torch.save's zip format, which can be read in parts"
        raise CheckpointError(f"{file} cannot be read as a torch state: {reason}. {_SAVE}.") from error


def _refused(error: Exception) -> str:
    """The name that torch would not load, out of its long message."""
    words = str(error).replace("`", " ").replace("\n", " ").split()
    for index, word in enumerate(words[:-1]):
        if word in ("GLOBAL", "class") and "." in words[index + 1]:
            return words[index + 1].rstrip(".,")
    return "objects of Python classes"


def _bare_names(stored: Iterable[str]) -> dict[str, str]:
    """Names without wrapper prefixes, and the stored name of each."""
    bare = {name: name for name in stored}
    for inner in _INNER:
        bare = {old: new.replace(inner, "") for old, new in bare.items()}
    while bare and all(new.startswith("module.") for new in bare.values()):
        bare = {old: new.removeprefix("module.") for old, new in bare.items()}
    return {new: old for old, new in bare.items()}
