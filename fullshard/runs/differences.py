"""What differs between the recipes of several runs. Must not know where recipes come from, nor how they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fullshard.config.part import flat

_SAME_EVERYWHERE = ("name", "output", "run", "stages", "data.cache")
"""Keys that name a run or its place; they differ without any meaning."""
_ABSENT = object()


def differences(recipes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each recipe the settings, by dotted key, that are not the same in all. A run without a recipe has none."""
    each = [{key: value for key, value in flat(recipe).items() if not _ignored(key)} for recipe in recipes]
    known = [values for values in each if values]
    keys = dict.fromkeys(key for values in known for key in values)
    apart = [key for key in keys if any(values.get(key, _ABSENT) != known[0].get(key, _ABSENT) for values in known)]
    return [{key: values[key] for key in apart if key in values} for values in each]


def _ignored(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in _SAME_EVERYWHERE)
