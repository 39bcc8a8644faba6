"""How a run's settings differ: from the defaults, and from those of the other runs on the page.

No code of a user is imported: a class of theirs has no known defaults, so that all of its settings count as set.
Must not know what any setting means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import PydanticUndefined

from fullshard.config.part import class_of, flat, plain
from fullshard.config.section import Section, keys_of, section_at
from fullshard.formatting.yaml_text import shown
from fullshard.recipe import Recipe
from fullshard.report.folders import Run

_NO_DEFAULT, _MISSING = "—", object()
Row = tuple[str, str, str]


def from_defaults(recipe: Mapping[str, Any]) -> list[Row]:
    """Key, value and default of every setting that is not the default."""
    return _differences(recipe, _defaults(Recipe), Recipe, "")


def _differences(
    values: Mapping[str, Any], defaults: Mapping[str, Any], cls: type[Section] | None, prefix: str
) -> list[Row]:
    found: list[Row] = []
    for key, value in values.items():
        where, usual = f"{prefix}{key}", defaults.get(key, _MISSING)
        if isinstance(value, Mapping) and value:
            found += _inside(value, usual, section_at(cls, key), where)
        elif value != usual:
            found.append((where, shown(value), _NO_DEFAULT if usual is _MISSING else shown(usual)))
    return found


def _inside(values: Mapping[str, Any], usual: Any, cls: type[Section] | None, where: str) -> list[Row]:
    """The differences within a section. Settings of another kind than the usual one have the defaults of that kind."""
    kind = values.get("kind")
    own = isinstance(kind, str) and "." in kind
    part = class_of(cls, values) if cls is not None and not own else None
    same = isinstance(usual, Mapping) and usual.get("kind") == kind
    defaults = usual if same else _defaults(part) if part else {}
    if not same and isinstance(usual, Mapping) and "kind" in usual:
        defaults = {**defaults, "kind": usual["kind"]}
    return _differences(values, defaults, part, f"{where}.")


def _defaults(cls: type[Section]) -> dict[str, Any]:
    """The defaults of a section as plain data, without what must be given."""
    every = {key: field.get_default(call_default_factory=True) for key, field in keys_of(cls).items()}
    return {key: _plain(default) for key, default in every.items() if default is not PydanticUndefined}


def _plain(default: Any) -> Any:
    if isinstance(default, Section):
        return plain(default)
    if isinstance(default, (list, tuple)):
        return [_plain(each) for each in default]
    if isinstance(default, Mapping):
        return {str(key): _plain(each) for key, each in default.items()}
    return default if isinstance(default, (str, int, float, bool, type(None))) else str(default)


def between(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The settings and versions in which the runs differ, with the value of each run."""
    every = [flat(run.recipe) | flat({"version": run.facts.get("versions") or {}}) for run in runs]
    keys = dict.fromkeys(key for values in every for key in values)
    rows = [(key, [shown(values[key]) if key in values else _NO_DEFAULT for values in every]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1 and key not in ("name", "output")]
