"""Presets: settings with a name that lie under a recipe. Built in are topologies that other trainers ship; your own are
the files of a folder `presets/`, beside the recipe or where you are, and win over built-in ones of the same name.

Later presets win over earlier ones, the recipe over all of them. Must not know what any key means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fullshard.dialects import files, report
from fullshard.dialects.rows import Dialect, nested
from fullshard.dialects.trainer_arguments import FSDP_ROWS
from fullshard.dialects.translate import translate
from fullshard.errors import RecipeError
from fullshard.formatting.yaml_text import parse, shown

KEY = "presets"
"""The key of a recipe that names them: one name or a list. A resolved recipe has their values, and no such key."""
_BUILT_IN = Path(__file__).parents[1] / "presets"


def known(recipe: object = None) -> dict[str, Path]:
    """The presets that a recipe can name, each with its file; `recipe` may be a path or a built-in name."""
    folders = [_BUILT_IN, Path("presets")]
    if isinstance(recipe, (str, Path)):
        folders.append(Path(recipe).expanduser().parent / "presets")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.y*ml"))}


def is_built_in(path: Path) -> bool:
    return path.parent == _BUILT_IN


def chosen(recipe: Mapping[str, Any], overrides: Sequence[tuple[Any, Any]], asked: str | Sequence[str]) -> list[str]:
    """The names in force: those of the recipe, or of `presets=` on the command line, then those of `--preset`."""
    named = [recipe.get(KEY), *(value for path, value in overrides if path == (KEY,))][-1]
    return [*_names(named), *_names(asked)]


def _names(value: Any) -> list[str]:
    names = list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]
    for name in names:
        if not isinstance(name, str):
            raise RecipeError(f"{KEY}: {shown(name)} is not the name of a preset. Write {KEY}: [NAME, NAME].")
    return names


def path_of(name: str, recipe: object = None) -> Path:
    """The file of a preset; an unknown name lists the nearest and all others."""
    files = known(recipe)
    if name not in files:
        near = get_close_matches(name, files, n=1)
        raise RecipeError(
            f"preset {name!r} is not known{f'; did you mean {near[0]!r}?' if near else '.'} Known: {', '.join(files)}. "
            "`fullshard presets` says what each is for; your own are NAME.yaml in a folder presets/ beside the recipe."
        )
    return files[name]


def values_of(name: str, recipe: object = None) -> dict[str, Any]:
    """The settings of a preset; of a FILE.json, those of the HF Trainer's `--fsdp-config FILE.json`."""
    if name.endswith(".json"):
        return _fsdp_settings(name)
    path = path_of(name, recipe)
    try:
        values = parse(path.read_text(encoding="utf-8"), name=f"preset {name} ({path})").values
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"preset {name}: {path} cannot be read ({error}).") from None
    if KEY in values:
        raise RecipeError(f"preset {name} ({path}): a preset cannot name other presets. Name all in the recipe.")
    return values


def _fsdp_settings(name: str) -> dict[str, Any]:
    values = files.load(name).values
    dialect = Dialect(name="the HF Trainer", title="", rows=FSDP_ROWS)
    done = translate(dialect, {"fsdp_config": values.get("fsdp_config", values)}, name=name)
    if done.refused:
        raise RecipeError(report.refusal(done))
    return nested(done.settings)
