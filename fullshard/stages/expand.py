"""From `stages:` to one complete recipe per stage: recipe, then the stage's own settings, then the command line.

Layers are laid again for every stage, as they were written, so that a stage that chooses another kind does not inherit
the defaults of the first one. Every problem names the key that caused it. Must not know what any setting does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fullshard.config.merge import Settings, show
from fullshard.config.part import decode, did_you_mean
from fullshard.config.section import section_at
from fullshard.dialects.words import in_our_words
from fullshard.errors import RecipeError
from fullshard.formatting.yaml_text import Document, shown
from fullshard.stages.start import begin, check_start

KEY = "stages"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_RESERVED = ("model", "best", "last")
_PRESETS = "presets"
_NOT_IN_A_STAGE = (KEY, "output", _PRESETS)
_COMMAND_LINE = "command line"


def named(document: Document) -> Document:
    """The document with its stages by name: `stages.sft.optimizer.lr` is the key of a setting, and has its line."""
    stages = document.values.get(KEY)
    if stages is None:
        return document
    if isinstance(stages, Mapping):
        entries = [(f"{KEY}.{name}", shown(name), value) for name, value in stages.items()]
    elif isinstance(stages, list):
        entries = [(f"{KEY}[{i}]", *_entry(_stated(value), i)) for i, value in enumerate(stages)]
    else:
        raise RecipeError(f"{KEY} must be a list of stages: - {{name: sft, data: ...}}.")
    found: dict[str, Any] = {}
    lines = dict(document.lines)
    for place, name, value in entries:
        _check_name(name, found)
        found[name] = _own(value, name)
        inside = {key: line for key, line in document.lines.items() if key == place or key.startswith(f"{place}.")}
        inside.setdefault(place, min(inside.values(), default=document.lines.get(KEY, 1)))  # where its entry begins
        lines |= {f"{KEY}.{name}{key.removeprefix(place)}": line for key, line in inside.items()}
    return replace(document, values={**document.values, KEY: found}, lines=lines)


def _entry(value: Any, index: int) -> tuple[str, Any]:
    name = value.get("name", f"stage{index + 1}") if isinstance(value, Mapping) else f"stage{index + 1}"
    return shown(name), value


def _stated(value: Any) -> Any:
    """A stage of a resolved recipe as a recipe writes it: its folders follow from the run."""
    if not isinstance(value, Mapping) or value.get(KEY, False) is not None:
        return value
    checkpoint = dict(value.get("checkpoint") or {})
    if checkpoint.get("store"):
        checkpoint["store"] = str(checkpoint["store"]).rpartition("/")[0]
    return {**{key: given for key, given in value.items() if key not in (KEY, "output")}, "checkpoint": checkpoint}


def _own(value: Any, name: str) -> dict[str, Any]:
    """The settings of one stage; none is allowed: it repeats the stage before it with the settings of the recipe."""
    if value is not None and not isinstance(value, Mapping):
        raise RecipeError(f"{KEY}.{name} must be a mapping of keys, such as {{data: ..., optimizer: {{lr: 1e-4}}}}.")
    own = {str(key).replace("-", "_"): given for key, given in (value or {}).items() if key != "name"}
    _require_allowed(own, name)
    return own


def _require_allowed(keys: Iterable[object], name: str) -> None:
    """Raises for a key that belongs to the whole run."""
    wrong = next((key for key in _NOT_IN_A_STAGE if key in keys), None)
    if wrong == KEY:
        raise RecipeError(f"{KEY}.{name}.{KEY}: a stage cannot have stages of its own. List them all in one {KEY}.")
    if wrong == _PRESETS:
        raise RecipeError(
            f"{KEY}.{name}.{wrong}: presets lie under the whole recipe, so a stage cannot have its own. Name them "
            f"beside {KEY}, or give the stage the settings that `fullshard presets NAME` shows."
        )
    if wrong:
        raise RecipeError(f"{KEY}.{name}.{wrong}: a stage cannot have it. Set {wrong} beside {KEY}, for the whole run.")


def _check_name(name: str, known: Mapping[str, Any]) -> None:
    if not _NAME.fullmatch(name) or name in _RESERVED or re.fullmatch(r"checkpoint-\d+", name):
        raise RecipeError(
            f"{KEY}: {name!r} cannot name a stage, which is a folder of the run. Use letters, digits, hyphens and "
            f"underscores, beginning with a letter or digit; {', '.join(_RESERVED)} and checkpoint-N are taken."
        )
    if name in known:
        raise RecipeError(f"{KEY}: {name!r} names two stages. Give each its own name.")


def require_names(document: Document, overrides: Sequence[tuple[tuple[str | int, ...], Any]]) -> None:
    """Raises for a setting of a stage by its index or number: a stage is named."""
    names = [str(name) for name in document.values.get(KEY) or ()]
    for path, value in overrides:
        if path[0] != KEY or len(path) < 2 or path[1] in names or not names:
            continue
        number = int(path[1]) + isinstance(path[1], int) if str(path[1]).isdecimal() else 0
        rest = show((KEY, names[number - 1], *path[2:])) if 0 < number <= len(names) else ""
        meant = f" Stage {number} is {names[number - 1]}: {rest}={shown(value)}." if rest else ""
        if meant or isinstance(path[1], int):
            raise RecipeError(f"{show(path)}: stages go by their names.{meant} Stages: {', '.join(names)}.")


def expanded(settings: Settings) -> dict[str, Any]:
    """The merged values, with each stage as the complete recipe that it stands for."""
    own = settings.values.get(KEY)
    if own is None:
        return settings.values
    if not own:
        raise RecipeError(f"{KEY} is empty. List at least one stage, or leave it out.")
    names = _names(settings)
    asked = [str(path[1]) for path, _, _ in settings.laid if len(path) > 1 and path[0] == KEY]
    if strange := next((name for name in asked if name not in names), None):
        raise RecipeError(
            f"{KEY}.{strange}: there is no such stage{did_you_mean(strange, names)}. Stages: {', '.join(names)}."
        )
    done: list[Any] = []
    values: list[dict[str, Any]] = []
    problems: list[str] = []
    for index, name in enumerate(names):
        stage = _laid(settings, name)
        before = names[:index]
        try:
            values.append(begin(stage, settings.values, name, before=before, others=names[index:]))
            done.append(decode(settings.section, values[-1]))
            check_start(done[-1], name, before=dict(zip(before, done, strict=False)))
        except RecipeError as error:
            problems += [_placed(line, stage, name) for line in str(error).splitlines()]
            done.append(None)
    if problems:
        raise RecipeError("\n".join(dict.fromkeys(problems)))
    # A recipe whose data are in its stages alone shows those of the first.
    shared = {key: values[0][key] for key in ("model", "data") if not _is_complete(settings, key)}
    return {**settings.values, **shared, KEY: done}


def _is_complete(settings: Settings, key: str) -> bool:
    """Whether a section beside `stages` could stand alone."""
    section = section_at(settings.section, key)
    try:
        return section is None or bool(decode(section, settings.values[key], where=key))
    except (KeyError, RecipeError):
        return False


def _defined(settings: Settings) -> list[Mapping[str, Any]]:
    """The stages by name, of each recipe layer; `stages=[...]` on the command line replaces them all."""
    whole = [value for path, value, _ in settings.laid if path == (KEY,)]
    laid = [named(Document({KEY: whole[-1]}, {})).values] if whole else [v for path, v, _ in settings.laid if not path]
    return [values[KEY] for values in laid if isinstance(values.get(KEY), Mapping)]


def _names(settings: Settings) -> list[str]:
    """The stages that recipes define, in order; the command line only changes them."""
    return list(dict.fromkeys(str(name) for stages in _defined(settings) for name in stages))


def _laid(settings: Settings, name: str) -> Settings:
    """All layers for one stage."""
    stage = Settings(settings.section)
    for path, values, layer in settings.laid:
        if not path:
            stage.lay({key: value for key, value in values.items() if key != KEY}, layer)
    before = len(stage.replaced)
    for stages in _defined(settings):
        stage.lay(stages.get(name) or {}, f"{KEY}.{name}")
    del stage.replaced[before:]  # what a stage changes is what it is for
    for path, value, layer in settings.laid:
        if path and path[0] != KEY:
            stage.set(path, value, layer)
    for path, value in _own_settings(settings, name):
        stage.set(path, value, f"{_COMMAND_LINE}, {KEY}.{name}")
    in_our_words(stage.values)
    return stage


def _own_settings(settings: Settings, name: str) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The settings of the command line for this stage alone."""
    for path, value, _ in settings.laid:
        if path[:2] != (KEY, name):
            continue
        if len(path) == 2:
            yield from (((key,), given) for key, given in _own(value, name).items())
        elif path[2] == "name":
            raise RecipeError(f"{KEY}.{name}.name: a stage is named in its recipe. Change it there.")
        else:
            _require_allowed(path[2:3], name)
            yield path[2:], value


def _placed(problem: str, stage: Settings, name: str) -> str:
    """A problem by the key that caused it: the stage's own, or one of the recipe that all stages have."""
    found = re.match(r"[\w.\[\]]+", problem)
    path = found.group() if found else ""
    if path.startswith(f"{KEY}."):
        return problem
    while path:
        layers = [o for key, o in stage.origins.items() if key == path or key.startswith((f"{path}.", f"{path}["))]
        if layers:
            return f"{KEY}.{name}.{problem}" if any(f"{KEY}.{name}" in layer for layer in layers) else problem
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return f"{KEY}.{name}.{problem}"


def replaced_in(settings: Settings) -> dict[str, list[str]]:
    """What the command line and presets replaced in each stage."""
    return {name: _laid(settings, name).replaced for name in _names(settings)} if settings.values.get(KEY) else {}
