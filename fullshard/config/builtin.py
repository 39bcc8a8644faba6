"""Built-in recipes and presets by name. Must not import anything heavy: the command line completes these names."""

from __future__ import annotations

from pathlib import Path

from fullshard.config import families
from fullshard.errors import SetupError

_PACKAGE = Path(__file__).parents[1]


def recipes() -> dict[str, Path]:
    """The recipes of every family, by name."""
    found: dict[str, Path] = {}
    for folder in families.paths("recipes"):
        for name, path in _yaml_files(folder).items():
            if name in found:
                raise SetupError(f"Two families bring a recipe called {name!r}: {found[name]} and {path}. Rename one.")
            found[name] = path
    return dict(sorted(found.items()))


def presets() -> dict[str, Path]:
    """The built-in presets by name."""
    return _yaml_files(_PACKAGE / "presets")


def _yaml_files(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
