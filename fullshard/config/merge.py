"""Layers of settings, one over the other: preset, recipe, command line.

Layers are plain mappings, merged before anything is checked, so that there is one validation path. The merge follows
the sections only to know short forms and keys that exclude each other. Must not know what any key means.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Union

from pydantic_core import PydanticUndefined

from fullshard.config.part import Part, Section, part_class
from fullshard.errors import RecipeError
from fullshard.formatting.plural import counted
from fullshard.formatting.yaml_text import parse_value, shown

_ASSIGNMENT = re.compile(r"^(?P<path>[A-Za-z_][\w.\-\[\]]*)=(?P<value>.*)$", re.DOTALL)
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


@dataclass(frozen=True)
class Override:
    """One setting of the command line."""

    path: tuple[str | int, ...]
    value: Any


@dataclass
class Settings:
    """The merged layers so far: the values, which layer each came from, and what replaced what."""

    section: type[Section]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)

    def lay(self, values: Mapping[str, Any], origin: str) -> None:
        """Puts a layer on top; its values win, key by key."""
        self.values = _merge(self, self.section, self.values, values, "", origin)

    def set(self, override: Override, origin: str) -> None:
        """Puts one setting on top; a list element is changed in place."""
        names = [i for i, step in enumerate(override.path) if isinstance(step, int)]
        path = override.path[: names[0]] if names else override.path
        value = override.value
        if names:
            value = _edit(self, path, override.path[names[0] :], value)
        for name in reversed(path):
            value = {name: value}
        self.lay(value, origin)


def parse_override(text: str) -> Override:
    """`optimizer.lr=3e-4`, `log.sinks[0].project=x`, `--batch.per-device=4`."""
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
    return Override(path, parse_value(found["value"], where=found["path"]))


def show(path: tuple[str | int, ...]) -> str:
    """A key path as it is written."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def _merge(state: Settings, cls: type[Section] | None, below: Any, above: Any, where: str, origin: str) -> Any:
    """`above` over `below`. A key that only one of them has is kept; lists and single values are replaced whole."""
    above = _long(cls, above)
    if not isinstance(above, Mapping):
        return above
    below, above = _long(cls, below), _underscored(cls, above, where)
    merged = dict(below) if isinstance(below, Mapping) else {}
    if cls is not None:
        cls = _settle_kind(state, cls, merged, above, where, origin)
        _drop_excluded(state, cls, merged, above, where, origin)
    for key, value in above.items():
        path, inner = f"{where}.{key}" if where else str(key), section_of(cls, str(key))
        if isinstance(_long(inner, value), Mapping) and (inner or isinstance(merged.get(key), Mapping)):
            merged[key] = _merge(state, inner, merged.get(key), value, path, origin)
        else:
            _note(state, cls, str(key), merged, value, path, origin)
            merged[key] = value
    return merged


def _settle_kind(
    state: Settings, cls: type[Section], below: dict[str, Any], above: Mapping[str, Any], where: str, origin: str
) -> type[Section]:
    """The class in force. Where a layer changes the kind, keys that the new kind does not have are dropped, aloud."""
    if not issubclass(cls, Part):
        return cls
    old, new = below.get("kind", cls.default_kind), above.get("kind", below.get("kind", cls.default_kind))
    if new is None:
        return cls
    try:
        settled = part_class(cls, str(new), where=where)
    except RecipeError:
        return cls  # decode reports it, with everything else that is wrong
    if new != old:
        known = {spec.alias or name for name, spec in settled.model_fields.items()} | {"kind"}
        for key in [key for key in below if key not in known]:
            lost = f"{shown(below.pop(key))} ({_origin(state, where, key)})"
            state.replaced.append(f"{where}.{key}: {lost} is dropped, {where}.kind = {new} ({origin}) has no such key")
    return settled


def _drop_excluded(
    state: Settings, cls: type[Section], below: dict[str, Any], above: Mapping[str, Any], where: str, origin: str
) -> None:
    """A higher layer that names one of several keys that exclude each other means that one."""
    for group in cls.exclusive:
        chosen = [key for key in group if above.get(key) is not None]
        for key in group:
            if chosen and key not in above and below.get(key) is not None:
                if origin != "recipe" and _origin(state, where, key) == origin:
                    raise RecipeError(
                        f"{origin}: {where}.{key} and {where}.{chosen[0]} exclude each other. Give one of them."
                    )
                state.replaced.append(
                    f"{where}.{key}: {shown(below.pop(key))} ({_origin(state, where, key)}) gives way to "
                    f"{where}.{chosen[0]} ({origin})"
                )


def _note(
    state: Settings, cls: type[Section] | None, key: str, below: Mapping[str, Any], value: Any, path: str, origin: str
) -> None:
    if key in below and below[key] != value:
        state.replaced.append(f"{path}: {shown(value)} ({origin}) over {shown(below[key])} ({_whence(state, path)})")
    elif key not in below and origin != "recipe":
        default = _default(cls, key)
        over = "" if default is PydanticUndefined else f" over {shown(default)} (default)"
        if default is PydanticUndefined or default != value:
            state.replaced.append(f"{path}: {shown(value)} ({origin}){over}")
    state.origins[path] = origin


def _origin(state: Settings, where: str, key: str) -> str:
    return state.origins.get(f"{where}.{key}" if where else key, "recipe")


def _whence(state: Settings, path: str) -> str:
    """Where a value comes from; a section, where its keys do."""
    inside = [origin for key, origin in state.origins.items() if key == path or key.startswith(f"{path}.")]
    return inside[-1] if inside else "recipe"


def _edit(state: Settings, path: tuple[str | int, ...], rest: tuple[str | int, ...], value: Any) -> list[Any]:
    """The list at `path` with one element (or a key inside it) changed."""
    cls: type[Section] | None = state.section
    found: Any = state.values
    annotation: Any = None
    for name in map(str, path):
        found = _long(cls, found)
        found = found if isinstance(found, Mapping) else {}
        annotation = _annotation(_concrete(cls, found), key := name.replace("-", "_") if cls else name)
        cls, found = _section_in(annotation), found.get(key)
    index = typing.cast(int, rest[0])
    if not isinstance(found, list) or index >= len(found):
        have = f"{counted(len(found), 'entry')}" if isinstance(found, list) else "no list"
        raise RecipeError(
            f"{show(path + rest)}: the recipe gives {have} at {show(path)}, so there is no [{index}] to change. "
            f"Set the whole list: {show(path)}=[...]."
        )
    element = _element_section(annotation)
    changed = value
    for step in reversed(rest[1:]):
        if isinstance(step, int):
            raise RecipeError(
                f"{show(path + rest)}: only one list index can be set. Set the whole list: {show(path)}=[...]."
            )
        changed = {step: changed}
    if len(rest) > 1:
        changed = _merge(Settings(state.section), element, found[index], changed, show(path), "command line")
    return [*found[:index], changed, *found[index + 1 :]]


def _long(cls: type[Section] | None, value: Any) -> Any:
    if cls is None or value is None or isinstance(value, Mapping):
        return value
    expanded = cls.from_short(value)
    if isinstance(expanded, Mapping) and issubclass(cls, Part) and cls.default_kind and "kind" not in expanded:
        # A path for a source means the default kind, also over a layer that named another one.
        return {"kind": cls.default_kind, **expanded}
    return expanded


def _underscored(cls: type[Section] | None, value: Mapping[Any, Any], where: str) -> Mapping[Any, Any]:
    """Hyphens of a section's keys as underscores; the keys of a plain mapping are the user's own."""
    if cls is None:
        return value
    keys = [shown(key).replace("-", "_") for key in value]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise RecipeError(
            f"{f'{where}.' if where else ''}{twice} is given twice, once with a hyphen. Keep one of them."
        )
    return dict(zip(keys, value.values(), strict=True))


def _concrete(cls: type[Section] | None, value: Any) -> type[Section] | None:
    if cls is None or not issubclass(cls, Part) or not isinstance(value, Mapping):
        return cls
    try:
        return part_class(cls, str(value.get("kind", cls.default_kind)), where="")
    except RecipeError:
        return cls


def _annotation(cls: type[Section] | None, key: str) -> Any:
    if cls is None:
        return None
    return next((f.annotation for name, f in cls.model_fields.items() if (f.alias or name) == key), None)


def section_of(cls: type[Section] | None, key: str) -> type[Section] | None:
    """The section behind a key, or None where the key holds a plain value."""
    return _section_in(_annotation(cls, key))


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union; a single type is its own only alternative."""
    return typing.get_args(annotation) if typing.get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _section_in(annotation: Any) -> type[Section] | None:
    return next((m for m in members(annotation) if inspect.isclass(m) and issubclass(m, Section)), None)


def _element_section(annotation: Any) -> type[Section] | None:
    for member in members(annotation):
        if typing.get_origin(member) in (list, tuple):
            return _section_in(typing.get_args(member)[0])
    return None


def _default(cls: type[Section] | None, key: str) -> Any:
    for name, spec in cls.model_fields.items() if cls is not None else ():
        if (spec.alias or name) == key and spec.default_factory is None:
            return spec.default
    return PydanticUndefined


__all__ = ["Override", "Settings", "members", "parse_override", "section_of", "show"]
