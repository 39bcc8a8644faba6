"""Merges layers of settings: the command line over the recipe over a preset.

Layers are plain mappings, merged before anything is checked, so that there is one validation path. Sections
matter only for short forms and for keys that exclude each other. Must not know what any key means.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import PydanticUndefined

from fullshard.config.part import Part, class_of
from fullshard.config.problems import join
from fullshard.config.section import Section, keys_of, section_at
from fullshard.errors import RecipeError
from fullshard.formatting.plural import counted
from fullshard.formatting.yaml_text import parse_value, shown

_ASSIGNMENT = re.compile(r"^(?P<path>[A-Za-z_][\w.\-\[\]]*)=(?P<value>.*)$", re.DOTALL)
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


Path = tuple[str | int, ...]
"""A key path: names of keys, and indices of list elements."""
Values = dict[str, Any]


def parse_override(text: str) -> tuple[Path, Any]:
    """The key path and value of `optimizer.lr=3e-4`, `log.sinks[0].project=x`, `--batch.per-device=4`."""
    found = _ASSIGNMENT.match(text.removeprefix("--"))
    if not found:
        raise RecipeError(
            f"{text!r} is not a setting. Settings on the command line look like optimizer.lr=3e-4: a key path, =, a "
            "value."
        )
    steps = _STEP.findall(found["path"])
    path = tuple(int(index) if index else name for name, index in steps)
    if show(path) != found["path"]:
        raise RecipeError(f"{text!r}: {found['path']!r} is not a key path. Write section.key or section.list[0].key.")
    return path, parse_value(found["value"], where=found["path"])


def show(path: Path) -> str:
    """A key path as a recipe writes it."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


@dataclass
class Settings:
    """The merged layers so far: the values, which layer each came from, and what replaced what."""

    section: type[Section]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)
    laid: list[tuple[Path, Any, str]] = field(default_factory=list)
    """Every layer and setting, in order, as they were given."""
    _layer: str = "command line"

    def lay(self, values: Mapping[str, Any], layer: str) -> None:
        """Puts a layer on top; its values win, key by key."""
        self.laid.append(((), values, layer))
        self._layer = layer
        self.values = self._merge(self.section, self.values, values, "")

    def set(self, path: Path, value: Any, layer: str) -> None:
        """Puts one setting on top; a list element is changed in place."""
        self.laid.append((path, value, layer))
        first = next((place for place, step in enumerate(path) if isinstance(step, int)), None)
        if first is not None:
            path, value = path[:first], self._edit(path[:first], path[first:], value)
        self._layer = layer
        self.values = self._merge(self.section, self.values, _nested(path, value), "")

    def _merge(self, cls: type[Section] | None, below: Any, above: Any, where: str) -> Any:
        """`above` over `below`. A key that only one of them has is kept; lists and single values are replaced whole."""
        above = _long(cls, above)
        if not isinstance(above, Mapping):
            return above
        below, above = _long(cls, below), _underscored(cls, above, where)
        merged = dict(below) if isinstance(below, Mapping) else {}
        if cls is not None:
            cls = self._settle_kind(cls, merged, above, where)
            self._drop_excluded(cls, merged, above, where)
        for key, value in above.items():
            path, inner = join(where, str(key)), section_at(cls, str(key))
            if isinstance(_long(inner, value), Mapping) and (inner or isinstance(merged.get(key), Mapping)):
                merged[key] = self._merge(inner, merged.get(key), value, path)
            else:
                self._note(_default(cls, str(key)), str(key), merged, value, path)
                merged[key] = value
        return merged

    def _settle_kind(self, cls: type[Section], below: Values, above: Values, where: str) -> type[Section]:
        """The class that applies. If a layer changes the kind, keys that the new one lacks are dropped, with a note."""
        settled = class_of(cls, {**below, **above})
        if not issubclass(cls, Part) or settled is cls:
            return settled
        new = above.get("kind", below.get("kind", cls.default_kind))
        if new != below.get("kind", cls.default_kind):
            for key in [key for key in below if key != "kind" and key not in keys_of(settled)]:
                lost = f"{shown(below.pop(key))} ({self._origin_of(join(where, key))})"
                self.replaced.append(
                    f"{where}.{key}: {lost} is dropped, {where}.kind = {new} ({self._layer}) has no such key"
                )
        return settled

    def _drop_excluded(self, cls: type[Section], below: Values, above: Values, where: str) -> None:
        """If a higher layer sets one of several keys that exclude each other, the others are dropped, with a note."""
        for group in cls.exclusive:
            chosen = next((f"{where}.{key}" for key in group if above.get(key) is not None), None)
            for key in group:
                if chosen and key not in above and below.get(key) is not None:
                    path, old = f"{where}.{key}", self._origin_of(f"{where}.{key}")
                    if self._layer != "recipe" and old == self._layer:
                        raise RecipeError(f"{old}: {path} and {chosen} exclude each other. Give one of them.")
                    value = shown(below.pop(key))
                    self.replaced.append(f"{path}: {value} ({old}) gives way to {chosen} ({self._layer})")

    def _note(self, default: Any, key: str, below: Values, value: Any, path: str) -> None:
        if key in below and below[key] != value:
            old = f"{shown(below[key])} ({self._origin_of(path)})"
            self.replaced.append(f"{path}: {shown(value)} ({self._layer}) over {old}")
        elif key not in below and self._layer != "recipe":
            over = "" if default is PydanticUndefined else f" over {shown(default)} (default)"
            if default is PydanticUndefined or default != value:
                self.replaced.append(f"{path}: {shown(value)} ({self._layer}){over}")
        self.origins[path] = self._layer

    def _origin_of(self, path: str) -> str:
        """The layer that a value comes from; for a section, that of its last key."""
        inside = [origin for key, origin in self.origins.items() if key == path or key.startswith(f"{path}.")]
        return inside[-1] if inside else "recipe"

    def _edit(self, path: Path, rest: Path, value: Any) -> list[Any]:
        """The list at `path` with one element (or a key inside it) changed."""
        cls: type[Section] | None = self.section
        element: type[Section] | None = None
        found: Any = self.values
        for name in map(str, path):
            found = _long(cls, found)
            found = found if isinstance(found, Mapping) else {}
            holder, key = class_of(cls, found) if cls else None, name.replace("-", "_") if cls else name
            cls, element, found = section_at(holder, key), section_at(holder, key, "list"), found.get(key)
        index = typing.cast(int, rest[0])
        if not isinstance(found, list) or index >= len(found):
            have = counted(len(found), "entry") if isinstance(found, list) else "no list"
            raise RecipeError(
                f"{show(path + rest)}: the recipe gives {have} at {show(path)}, so there is no [{index}] to change. "
                f"Set the whole list: {show(path)}=[...]."
            )
        if any(isinstance(step, int) for step in rest[1:]):
            raise RecipeError(
                f"{show(path + rest)}: only one list index can be set. Set the whole list: {show(path)}=[...]."
            )
        changed = _nested(rest[1:], value)
        if len(rest) > 1:
            changed = Settings(self.section)._merge(element, found[index], changed, show(path))
        return [*found[:index], changed, *found[index + 1 :]]


def _nested(path: Path, value: Any) -> Any:
    for name in reversed(path):
        value = {name: value}
    return value


def _long(cls: type[Section] | None, value: Any) -> Any:
    if cls is None or value is None or isinstance(value, Mapping):
        return value
    expanded = cls.from_short(value)
    if isinstance(expanded, Mapping) and issubclass(cls, Part) and cls.default_kind and "kind" not in expanded:
        # A path for a source means the default kind, also over a layer that named another one.
        return {"kind": cls.default_kind, **expanded}
    return expanded


def _underscored(cls: type[Section] | None, value: Mapping[Any, Any], where: str) -> Values:
    """Replaces hyphens in the keys of a section by underscores; the keys of a plain mapping stay as they are."""
    if cls is None:
        return dict(value)
    keys = [shown(key).replace("-", "_") for key in value]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise RecipeError(f"{join(where, twice)} appears twice, once with a hyphen. Keep one of them.")
    return dict(zip(keys, value.values(), strict=True))


def _default(cls: type[Section] | None, key: str) -> Any:
    spec = keys_of(cls).get(key)
    if spec is None:
        return None if cls is not None and key in cls.no_effect else PydanticUndefined
    return spec.default if spec.default_factory is None else PydanticUndefined
