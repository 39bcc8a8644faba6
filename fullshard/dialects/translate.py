"""Another trainer's file in our words: each key with its verdict, and the settings that follow.

Nothing is dropped silently: a key that no row knows is refused. Must not know the recipe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fullshard.dialects.kinds import BadValue
from fullshard.dialects.readers import EXCLUSIVE
from fullshard.dialects.rows import UNSET, Dialect, File, Outcome, Row, Said, Settings, Verdict, nested
from fullshard.errors import RecipeError
from fullshard.formatting.yaml_text import shown

RANKS = ("topology.devices", "topology.nodes")


def wins(key: str, left_out: Sequence[str]) -> bool:
    """Whether a launcher's key is in force over a training file that leaves these out."""
    return key in RANKS or (key == "precision" and key in left_out)


@dataclass(frozen=True)
class Translation:
    """A file in our words."""

    dialect: Dialect
    name: str
    said: tuple[Said, ...]
    settings: Settings
    file: File = field(default_factory=File)
    """Its values as they were understood."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Our keys whose values the file leaves to its trainer."""
        return tuple(key for said in self.said if said.verdict == "default" for key in said.settings)

    def layers(self, left_out: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """A launcher's settings: those that fill in what the recipe leaves open, and those that are in force: its
        ranks, and its precision over one that a training file leaves out."""
        over = {key: value for key, value in self.settings.items() if wins(key, left_out)}
        return nested({key: value for key, value in self.settings.items() if key not in over}), nested(over)

    @property
    def refused(self) -> list[Said]:
        return [said for said in self.said if said.verdict == "refused"]


def translate(
    dialect: Dialect, values: Mapping[str, Any], *, name: str = "the file", folder: Path = Path()
) -> Translation:
    """Reads every key of a file, then fills in what its trainer uses for keys that the file leaves out."""
    file = File(values, folder)
    file = dialect.prepare(file) if dialect.prepare else file
    if dialect.stages and (stages := dialect.stages(file)):
        return _staged(dialect, file, stages, name)
    given, file = file.values, File(of_their_kind(dialect, file.values), folder)
    said = list(_each(dialect, given, file, ""))
    why_none = dialect.no_adapters(file) if dialect.no_adapters else ""
    if why_none:
        said = [_without_adapters(entry, why_none) for entry in said]
    settings: Settings = {}
    source: dict[str, Said] = {}
    for entry in said:
        for key, value in entry.settings.items():
            if key in settings and settings[key] != value:
                raise RecipeError(
                    f"{name}: {source[key].key}: {shown(source[key].value)} and {entry.key}: {shown(entry.value)} both "
                    f"set {key}. Keep one of them."
                )
            settings[key], source[key] = value, entry
    for entry in _defaults(dialect, file, said, settings, adapters=not why_none):
        said.append(entry)
        settings |= entry.settings
    return Translation(dialect, name, tuple(said), settings, file)


def of_their_kind(dialect: Dialect, values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The values of a file in the kind that their row takes, without those that it does not take."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{where}.{key}" if where else str(key)
        row = dialect.row(path)
        if row is None and isinstance(value, Mapping):
            found[key] = of_their_kind(dialect, value, path)
        elif value is not None:
            with contextlib.suppress(BadValue):
                found[key] = value if row is None else row.takes.read(value)
    return found


def _each(dialect: Dialect, values: Mapping[str, Any], file: File, where: str) -> Iterator[Said]:
    for key, value in values.items():
        path = f"{where}.{key}" if where else str(key)
        if value is None:
            continue  # the same as leaving the key out
        row = dialect.row(path)
        if row is not None:
            yield _said(path, value, row.read(value, file))
        elif isinstance(value, Mapping):
            yield from _each(dialect, value, file, path)
        else:
            yield Said(path, value, "refused", {}, _unknown(dialect, path, value, file.folder))


def _said(path: str, value: Any, outcome: Outcome) -> Said:
    verdict: Verdict = outcome.verdict
    if outcome.settings and verdict != "refused":
        verdict = "kept" if list(outcome.settings) == [path] and outcome.settings[path] == value else "renamed"
    elif verdict == "renamed" and not outcome.why:
        verdict = "no effect"
    return Said(path, value, verdict, outcome.settings, outcome.why)


def _without_adapters(entry: Said, why: str) -> Said:
    """A rank or targets beside a switch that is off: a recipe with them would train adapters."""
    if not any(key.startswith("model.lora.") for key in entry.settings):
        return entry
    return replace(entry, verdict="no effect", settings={}, why=why)


def _unknown(dialect: Dialect, path: str, value: Any, folder: Path) -> str:
    if path in dialect.sections or any(spelling.startswith(f"{path}.") for spelling in dialect.spellings):
        if isinstance(value, str) and value.endswith((".json", ".yaml", ".yml")):
            return f"there is no file {value} here or in {folder}"
        return "a section of keys is needed here"
    near = get_close_matches(path, dialect.spellings, n=1, cutoff=0.75)
    meant = f" Did you mean {near[0]}?" if near else ""
    return f"no key of {dialect.name} that fullshard knows.{meant}"


def _defaults(dialect: Dialect, file: File, said: list[Said], settings: Settings, *, adapters: bool) -> Iterator[Said]:
    """What the trainer uses for keys that its file leaves out, unless another key of the file decides the same."""
    if dialect.finish:
        yield from dialect.finish(settings, file)
    given = [dialect.row(entry.key) for entry in said if entry.verdict not in ("refused", "default")]
    for row in dialect.rows:
        if row.default is UNSET or row in given or _decided(row, settings):
            continue
        found = row.read(row.default, file)
        if found.settings and (adapters or not row.key.startswith("model.lora")):
            yield Said(row.theirs[0], row.default, "default", found.settings, found.why)
    for key, value in dialect.always.items():
        if key not in settings:
            yield Said(key, value, "default", {key: value})


def _decided(row: Row, settings: Settings) -> bool:
    others = [key for group in EXCLUSIVE if row.key in group for key in group]
    return any(key in settings for key in (row.key, *others))


def _staged(dialect: Dialect, file: File, stages: Mapping[str, File], name: str) -> Translation:
    """A file with stages: what all of them say stands above `stages`; one alone is the recipe itself."""
    done = {stage: translate(dialect, inner.values, name=name, folder=inner.folder) for stage, inner in stages.items()}
    rest = {key: value for key, value in file.values.items() if key != dialect.stages_key}
    shared_keys = {key for inner in stages.values() for key in inner.values if inner.values[key] is rest.get(key)}
    around = translate(dialect, {key: value for key, value in rest.items() if key not in shared_keys}, name=name)
    said = list(around.said)
    for stage, each in done.items():
        said += [replace(entry, key=f"{dialect.stages_key}.{stage}.{entry.key}") for entry in each.said]
    first, *others = [each.settings for each in done.values()]
    if not others:
        return Translation(dialect, name, tuple(said), around.settings | first)
    own = ("output", "name")  # a stage is a folder of the run
    common = {k: v for k, v in first.items() if k not in own and all(each.get(k, UNSET) == v for each in others)}
    listed = [
        {"name": stage} | nested({k: v for k, v in each.settings.items() if k not in common and k not in own})
        for stage, each in done.items()
    ]
    return Translation(dialect, name, tuple(said), around.settings | common | {"stages": listed})
