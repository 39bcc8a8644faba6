"""Finds families: each folder of `fullshard/families`, and each package that an installed distribution registers.

    [project.entry-points."fullshard.families"]
    speech = "my_package.speech"

A family's folder `objectives/` holds its objectives, `models/` its models, and so on: the folders that contracts name.
Its `recipes/` are built in, and each file of its `commands/` is a command: a function with the name of the file.
Must not import a family's parts, nor anything heavy: the command line completes the names of recipes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from fullshard.errors import SetupError

GROUP = "fullshard.families"
"""The entry point group, and the package of the built-in families."""


@functools.cache
def families() -> dict[str, str]:
    """Each family's name and package; all of them can be imported."""
    modules = pkgutil.iter_modules(importlib.import_module(GROUP).__path__)
    found = {module.name: f"{GROUP}.{module.name}" for module in modules if module.ispkg}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        if found.setdefault(entry.name, entry.value) != entry.value:
            raise SetupError(
                f"Two packages provide a family called {entry.name!r}: {found[entry.name]} and {entry.value}. "
                f"Uninstall {_distribution(entry)}, or rename its entry point."
            )
        try:
            importlib.import_module(entry.value)
        except Exception as error:  # whatever another package raises
            raise SetupError(
                f"The family {entry.name!r} of the installed package {_distribution(entry)} cannot be used: its module "
                f"{entry.value} failed to import ({type(error).__name__}: {error}). Reinstall or uninstall "
                f"{_distribution(entry)}."
            ) from error
    return found


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.value.partition(".")[0]


@functools.cache
def folders(name: str) -> tuple[str, ...]:
    """The packages with this name inside the families."""
    packages = (f"{family}.{name}" for family in families().values())
    return tuple(package for package in packages if importlib.util.find_spec(package) is not None)


def paths(name: str) -> list[Path]:
    """The folders with this name inside the families, as paths; they need not contain Python."""
    roots = [Path(root) for package in families().values() for root in importlib.import_module(package).__path__]
    return [root / name for root in roots if (root / name).is_dir()]


def commands() -> dict[str, str]:
    """The commands that families provide, each with its module."""
    found: dict[str, str] = {}
    for package in folders("commands"):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            name, path = module.name, f"{package}.{module.name}"
            if found.setdefault(name, path) != path:
                raise SetupError(f"fullshard {name} is ambiguous: {found[name]} and {package} provide it.")
    return found


def recipes() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in (path for folder in paths("recipes") for path in sorted(folder.glob("*.yaml"))):
        if found.setdefault(path.stem, path) != path:
            raise SetupError(
                f"Two families provide a recipe called {path.stem!r}: {found[path.stem]} and {path}. Rename one."
            )
    return dict(sorted(found.items()))
