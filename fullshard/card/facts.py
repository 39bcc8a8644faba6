"""What a model card states, from the facts that a checkpoint keeps and the numbers of the run.

Folders of this machine are cut to their last part: a card is made to be published. Must not know Markdown.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.log import metrics

if TYPE_CHECKING:
    from torch import nn

    from fullshard.contracts.model import Family

_NOT_THE_MODEL = ("output", "topology", "checkpoint", "evaluate", "log", "guard", "stages")
"""Sections of a recipe that do not change what is trained."""
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LIBRARIES = ("fullshard", "torch", "transformers", "peft", "diffusers", "sentence-transformers")


@dataclass(frozen=True)
class Exported:
    """What was written, and the facts of the run it comes from."""

    family: Family
    module: nn.Module
    state: Mapping[str, Any]
    """As in a checkpoint's state.json: progress, recipe, data, identity, world_size."""
    step: int
    """Whose weights they are."""
    form: str
    """`whole`, `adapter` or `merged`."""
    averaged: bool
    run: Path
    """The run folder, which may hold metrics.jsonl."""

    @property
    def recipe(self) -> Mapping[str, Any]:
        return _mapping(self.state.get("recipe"))

    @property
    def model(self) -> Mapping[str, Any]:
        return _mapping(self.recipe.get("model"))

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The run's numbers; empty if only its checkpoint is here."""
        try:
            return metrics.read(self.run / metrics.FILE)
        except OSError:
            return []

    @property
    def progress(self) -> Mapping[str, Any]:
        return _mapping(self.state.get("progress"))


@dataclass(frozen=True)
class Base:
    """What training started from."""

    name: str
    """A name on the Hub, or what a local folder is called; empty: from scratch."""
    on_hub: bool


def base_of(exported: Exported, folder: Path) -> Base:
    """The base model: the one that exported adapters name, or else that of the recipe."""
    model, start = exported.model, _mapping(exported.recipe.get("start"))
    name = _adapter_base(folder) or model.get("base") or model.get("path")
    if name is None:
        return Base(public(str(model.get("from") or start.get("from") or "")), False)
    return Base(public(str(name)), is_hub_name(str(name)))


def _adapter_base(folder: Path) -> str | None:
    try:
        found = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found.get("base_model_name_or_path") if isinstance(found, dict) else None


def is_hub_name(name: str) -> bool:
    """Whether a name can only be one of the Hub."""
    return bool(_HUB.fullmatch(name)) and not os.path.exists(name)


def public(text: str) -> str:
    """A name without the folders of this machine, and a URL without user, password and query."""
    if "://" in text:
        return re.sub(r"://[^/@]*@", "://", text.partition("?")[0])
    local = os.path.isabs(text) or text.startswith(("~", "./", "../")) or (os.sep in text and os.path.exists(text))
    return (text.rstrip("/").rpartition("/")[2] or text) if local else text


def settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a recipe that decides what is trained, without what is unset."""
    kept = {name: value for name, value in recipe.items() if name not in _NOT_THE_MODEL}
    found: dict[str, Any] = _public(kept)
    return found


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        each = {str(key): _public(inner) for key, inner in value.items()}
        return {key: inner for key, inner in each.items() if inner not in (None, {}, [])}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_public(inner) for inner in value]
    return public(value) if isinstance(value, str) else value


def hub_datasets(recipe: Mapping[str, Any]) -> list[str]:
    """Names of data sets on the Hub that the run read."""
    found = (each["name"] for each in _sources(_mapping(recipe.get("data"))) if each.get("kind") == "hub")
    return sorted({str(name) for name in found if is_hub_name(str(name))})


def _sources(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every mapping in it that may be a source."""
    if isinstance(value, Mapping):
        if "kind" in value and "name" in value:
            yield value
        for inner in value.values():
            yield from _sources(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _sources(inner)


def counts_tokens(exported: Exported) -> bool:
    """Whether `tokens` of its progress are tokens, not images."""
    return any("tokens_per_second" in record for record in exported.records)


def results(exported: Exported) -> tuple[int | None, dict[str, float], float | None]:
    """The step of the last validation up to the exported one, its numbers, and the training loss logged last."""
    records = (record for record in exported.records if isinstance(record.get("step"), int))
    before = [record for record in records if record["step"] <= exported.step]
    judged = [record for record in before if record.get("kind") == "validation"]
    losses = [record["loss"] for record in before if record.get("kind") == "train" and _is_number(record.get("loss"))]
    step = judged[-1]["step"] if judged else None
    numbers: dict[str, float] = {}
    for record in judged:
        if record["step"] == step:
            skipped = ("step", "epoch", "total_step")
            numbers |= {key: value for key, value in record.items() if _is_number(value) and key not in skipped}
    return step, numbers, losses[-1] if losses else None


def parameters(exported: Exported) -> tuple[int, int]:
    """All parameters, and those of adapters."""
    adapters, sizes = exported.family.adapters(exported.module), dict(exported.module.named_parameters())
    return sum(p.numel() for p in sizes.values()), sum(sizes[name].numel() for name in adapters)


def versions() -> list[str]:
    """The libraries that are installed here."""
    found = []
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
