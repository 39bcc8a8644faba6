"""One file per trainer. To add one, add a file with a `DIALECT`."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from fullshard.dialects.rows import Dialect

_FIRST = ("flags", "hf_trainer", "accelerate")
"""Whose meaning an error message takes for a key that several trainers have; the others follow by name."""


@functools.cache
def dialects() -> dict[str, Dialect]:
    """Every dialect by the name of its file."""
    names = {module.name for module in pkgutil.iter_modules(__path__)}
    ordered = [*(name for name in _FIRST if name in names), *sorted(names - set(_FIRST))]
    return {name: importlib.import_module(f"{__name__}.{name}").DIALECT for name in ordered}
