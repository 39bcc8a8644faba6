"""Where families live: each folder of `fullshard/families`, and each package that an installed distribution names.

    [project.entry-points."fullshard.families"]
    speech = "my_package.speech"

A family's folder `objectives/` holds its objectives, `models/` its models, and so on: the folders that contracts name.
Its `recipes/` are built in, and each file of its `commands/` is a command. Must not import a family's parts.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import pkgutil
from pathlib import Path

from fullshard.errors import SetupError

GROUP = "fullshard.families"
"""The entry point group, and the package of the built-in families."""


@functools.cache
def families() -> dict[str, str]:
    """Each family's name and package."""
    found = {
        module.name: f"{GROUP}.{module.name}"
        for module in pkgutil.iter_modules(importlib.import_module(GROUP).__path__)
        if module.ispkg
    }
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        if found.setdefault(entry.name, entry.value) != entry.value:
            raise SetupError(
                f"Two packages bring a family called {entry.name!r}: {found[entry.name]} and {entry.value}. "
                "Uninstall one of them, or rename its entry point."
            )
    return found


@functools.cache
def folders(name: str) -> tuple[str, ...]:
    """The packages of this name inside the families."""
    return tuple(package for family in families().values() if exists(package := f"{family}.{name}"))


def paths(name: str) -> list[Path]:
    """The folders of this name inside the families, as paths; they need not hold Python."""
    roots = [Path(root) for package in families().values() for root in importlib.import_module(package).__path__]
    return [root / name for root in roots if (root / name).is_dir()]


def exists(package: str) -> bool:
    """Whether a package can be imported; its parents are imported to find out."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


__all__ = ["GROUP", "exists", "families", "folders", "paths"]
