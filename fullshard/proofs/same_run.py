"""Proves that all ranks belong to the same run: they have the same recipe, versions, code, data and model.

`train` and `check` compare right after the ranks have connected, and once the model has its values. Must not know how
findings are shown.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import json
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.config.part import flat
from fullshard.data.prepare import Prepared
from fullshard.data.store import processor_fingerprint
from fullshard.dist import reduce
from fullshard.dist.agreement import Facts, differences, some
from fullshard.dist.values import checksums, fingerprints
from fullshard.errors import SetupError

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "peft",
    "datasets",
    "safetensors",
    "numpy",
    "torchao",
    "diffusers",
    "sentence-transformers",
)
"""Libraries whose version may change the numbers of a run."""
_MAY_DIFFER = ("topology.", "data.cache", "data.workers")
"""Settings that may differ from node to node."""


@dataclass(frozen=True)
class Subject:
    """One thing that ranks compare."""

    name: str
    facts: Facts
    what: str
    """What all ranks must have, for the message: "the same recipe"."""
    remedy: str
    agreed: str
    """What to say when they agree."""


def subjects(
    settings: Mapping[str, Any],
    *,
    realised: Mapping[str, str],
    module: nn.Module,
    config: Mapping[str, Any],
    data: Prepared,
    identity: Mapping[str, Any],
    processor: Any,
) -> list[Subject]:
    """What this rank has, by subject. `settings` is the whole recipe, `realised` what this rank adds to it (options of
    the command, and what "auto" became here), `config` the model's config, `identity` the order of the data."""
    recipe = {key: str(value) for key, value in flat(settings).items() if not key.startswith(_MAY_DIFFER)}
    installed = versions()
    shown = ", ".join(f"{name} {value}" for name, value in list(installed.items())[:3])
    return [
        Subject(
            "recipe",
            {**recipe, **realised},
            "the same recipe",
            "Give every node the same recipe file and the same command.",
            "the same on every rank",
        ),
        Subject(
            "versions",
            installed,
            "the same versions",
            "Install the same versions on every node, or use one shared environment.",
            f"{shown} on every rank",
        ),
        Subject(
            "code",
            code(settings, module),
            "the same code",
            "Put the same code on every node, or use one shared folder.",
            "fullshard, the run's own parts and the model's class are the same on every rank",
        ),
        Subject(
            "data",
            _data(data, identity, processor),
            "the same data",
            "Give every node the same files.",
            "the same content on every rank",
        ),
        Subject(
            "model",
            _model(module, config),
            "the same model",
            "Give every node the same model folder.",
            "the same config and shapes on every rank",
        ),
    ]


def compare(subject: Subject) -> str | None:
    """A sentence that says how the ranks differ; None if they agree. A collective."""
    found = differences(subject.facts)
    return f"the ranks do not have {subject.what}: {some(found)}." if found else None


def require(compared: list[Subject]) -> None:
    """Raises the same SetupError on every rank if they differ in any subject. A collective."""
    problems = [f"{s.name}: {text} {s.remedy}" for s in compared if (text := compare(s)) is not None]
    if problems:
        raise SetupError("\n".join(problems))


def require_equal_values(module: nn.Module) -> None:
    """Raises SetupError unless replicas of a parameter, and every rank's copy of a buffer, are equal in every bit. A
    collective."""
    if reduce.place()[0] == 1:
        return
    sums = fingerprints(dict(module.named_parameters()))
    buffers = {name: torch.view_as_real(b) if b.is_complex() else b for name, b in module.named_buffers() if b.numel()}
    if buffers:
        sums |= zip(buffers, checksums(list(buffers.values())).tolist(), strict=True)
    if found := differences({name: str(each) for name, each in sums.items()}):
        raise SetupError(
            f"The ranks start from different values (the sums of their bits differ): {some(found)}. Check that every "
            "node has the same model folder, the same kind of GPU and the same versions."
        )


def versions() -> dict[str, str | None]:
    """The versions of Python and each library; None if it is not installed, which stops only a run that needs it."""
    found: dict[str, str | None] = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def code(settings: Mapping[str, Any], module: nn.Module) -> dict[str, str | None]:
    """A hash of our sources, of the files of the user's parts and of the file of the model's class."""
    found: dict[str, str | None] = {"fullshard": _own_sources()}
    for name, path in [*_user_files(settings), (type(module).__module__, _file_of(type(module)))]:
        found[name] = None
        if path is not None and path.is_file():
            found[name] = hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()
    return found


@functools.cache
def _own_sources() -> str:
    """The version, and a hash that distinguishes two source trees of one version."""
    folder = Path(__file__).parents[1]
    content = hashlib.blake2b(digest_size=6)
    for path in sorted(folder.rglob("*.py")):
        content.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    try:
        version = importlib.metadata.version("fullshard")
    except importlib.metadata.PackageNotFoundError:
        version = "a source folder"
    return f"{version} ({content.hexdigest()})"


def _user_files(settings: Mapping[str, Any]) -> Iterator[tuple[str, Path | None]]:
    """The files of `my_package.my_module.Name` and `path.py:Name` among the settings; None for a module that is not
    loaded here: only the rank that encodes the data loads the encoder, the others read its result."""
    for value in map(str, _leaves(settings)):
        if match := re.fullmatch(r"(.+\.py):\w+", value):
            yield match[1], Path(match[1]).expanduser()
        elif (name := value.rpartition(".")[0]) and not name.startswith("fullshard."):
            file = getattr(sys.modules.get(name), "__file__", None)
            yield name, Path(file) if file else None


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        yield value
        return
    for item in value:
        yield from _leaves(item)


def _file_of(found: type) -> Path | None:
    try:
        return Path(inspect.getfile(found))
    except (TypeError, OSError):
        return None


def _data(data: Prepared, identity: Mapping[str, Any], processor: Any) -> dict[str, str | None]:
    held_out = data.validation_from
    return {
        **{key: str(value) for key, value in identity.items()},
        "content of data.validation": held_out.records.fingerprint() if held_out is not None else "no data",
        "tokenizer": processor_fingerprint(processor),
    }


def _model(module: nn.Module, config: Mapping[str, Any]) -> dict[str, str | None]:
    shapes = [(name, list(p.shape), p.requires_grad) for name, p in module.named_parameters()]
    shapes += [(name, list(b.shape), False) for name, b in module.named_buffers()]
    content = hashlib.blake2b(json.dumps(shapes).encode(), digest_size=6).hexdigest()
    found: dict[str, str | None] = {"parameters": f"{len(shapes)} tensors ({content})"}
    # Keys with an underscore are the library's notes: where a model came from, and lists made from sets, whose order
    # differs from process to process.
    values = {key: value for key, value in flat(config).items() if not key.rpartition(".")[2].startswith("_")}
    values.pop("transformers_version", None)
    return found | {f"config.{key}": str(value) for key, value in values.items()}
