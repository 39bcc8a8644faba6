"""The rows of a dialect: another trainer's keys, and what each is here.

A dialect is one file in `tables/`: how its files are recognised, and its rows. Reading a file, the flags of the command
line, error messages and the pages of documentation all use these rows. Must not know the recipe: a test checks that
every key of ours that a row names exists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fullshard.dialects.kinds import ANYTHING, OF_KEYS, SWITCH, TEXT, TEXTS, BadValue, Kind
from fullshard.dialects.words import our_word
from fullshard.formatting.yaml_text import parse_value, shown

Verdict = Literal["kept", "renamed", "default", "no effect", "refused"]
Settings = dict[str, Any]
"""Our keys as paths, `optimizer.lr`, with their values."""
UNSET: Any = object()


@dataclass(frozen=True)
class File:
    """Another trainer's file, for a row whose meaning depends on other keys. Readers and the functions of a dialect see
    values of the kind that their row takes: true for `yes`, a number for `"2e-5"`, and no value that is refused."""

    values: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a path, `fsdp_config.fsdp_version`; null counts as left out."""
        found: Any = self.values
        for step in path.split("."):
            found = found.get(step) if isinstance(found, Mapping) else None
        return default if found is None else found


@dataclass(frozen=True)
class Outcome:
    """What one key of a file means: settings of ours, or why it has none."""

    settings: Settings = field(default_factory=dict)
    verdict: Verdict = "renamed"
    why: str = ""


@dataclass(frozen=True)
class Said:
    """One key of a file, and what it means here."""

    key: str
    value: Any
    verdict: Verdict
    settings: Settings
    why: str = ""


Reader = Callable[[Any, File], "Outcome | Settings"]


@dataclass(frozen=True)
class Row:
    """One or several spellings of a key, and what it is here."""

    theirs: tuple[str, ...]
    ours: str = ""
    """Our key, with a form for its value: `data.train={kind: hub, name: $}`; empty for a key without a counterpart."""
    why: str = ""
    """For a key with no effect or a refused one: the reason. Else: a remark for the documentation."""
    verdict: Verdict = "renamed"
    reader: Reader | None = None
    """Reads a value that no form describes."""
    takes: Kind = ANYTHING
    """What a value may be; any other is refused."""
    default: Any = UNSET
    """What the other trainer uses if its file leaves the key out, where fullshard would use another value."""
    read_with: str = ""
    """Another key of theirs whose row reads this one."""
    asks_nothing: tuple[Any, ...] = ()
    """Values that ask for what happens anyway, or for nothing."""

    @property
    def key(self) -> str:
        return self.ours.partition("=")[0]

    @property
    def form(self) -> str:
        return self.ours.partition("=")[2] or "$"

    @property
    def is_switch(self) -> bool:
        """Whether their key is on or off, and stands for a fixed value of ours."""
        return self.reader is None and bool(self.ours) and "$" not in self.form

    def read(self, value: Any, file: File) -> Outcome:
        """What a value of this key means."""
        if self.verdict in ("no effect", "refused"):
            # True is not the 1 of a share or a count.
            quiet = any(value == each and (value is not True or each is True) for each in self.asks_nothing)
            return Outcome(verdict="no effect" if quiet else self.verdict, why="" if quiet else self.why)
        try:
            return self._meaning(None if value is None else self.takes.read(value), file)
        except BadValue as error:
            return refused(str(error))

    def _meaning(self, value: Any, file: File) -> Outcome:
        if self.reader is not None:
            found = self.reader(value, file)
            found = found if isinstance(found, Outcome) else Outcome(found)
            return replace(found, settings={key: _checked(key, each) for key, each in found.settings.items()})
        form = parse_value(self.form, where=self.key)
        if self.is_switch:
            return Outcome({self.key: form}) if value else Outcome(verdict="no effect")
        return Outcome({self.key: _filled(form, value)})


@dataclass(frozen=True)
class Dialect:
    """Another trainer: its name, how its files are recognised, and its rows."""

    name: str
    """As a sentence names it: `axolotl`, `accelerate`."""
    title: str
    """The heading of its section in the documentation."""
    rows: tuple[Row, ...]
    marks: tuple[str, ...] = ()
    """Keys, as paths, that files of this trainer have and others lack; the dialect with most of them is chosen."""
    sections: tuple[str, ...] = ()
    """Sections of its files whose keys the rows name without the section."""
    launches: bool = False
    """Whether its files say how ranks are started and sharded, beside a file that says what is trained."""
    intro: str = ""
    """What the documentation says before the table."""
    prepare: Callable[[File], File] | None = None
    """Brings a file into the form that the rows describe."""
    finish: Callable[[Settings, File], Iterator[Said]] | None = None
    """What follows from several keys together, or from their absence."""
    no_adapters: Callable[[File], str] | None = None
    """Why a file trains no adapters, so that its keys for them have no effect; empty if it does."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ours for what this trainer always does, unless a key of its file says otherwise."""
    stages: Callable[[File], dict[str, File]] | None = None
    """The stages of a file that has several, each as a file of its own."""
    stages_key: str = ""
    """Where they are."""

    def row(self, path: str) -> Row | None:
        """The row of a key of its files."""
        known = self.spellings
        path = path.replace("-", "_")
        if path in known:
            return known[path]
        section, _, rest = path.partition(".")
        return known.get(rest) if rest and section in self.sections else None

    @property
    def spellings(self) -> dict[str, Row]:
        return {spelling: row for row in self.rows for spelling in row.theirs}


def to(ours: str, theirs: str, *, default: Any = UNSET, note: str = "") -> Row:
    """Our key takes their value, in our words; with `key=word`, if their switch is on."""
    key, _, form = ours.partition("=")
    takes = kind_of(key) if not form else SWITCH if "$" not in form else TEXTS if form == "[$]" else TEXT
    return Row(tuple(theirs.split()), ours, why=note, default=default, takes=takes)


def reads(
    ours: str, reader: Reader, theirs: str, *, takes: Kind | None = None, default: Any = UNSET, note: str = ""
) -> Row:
    """A function reads their value, which is what our key takes, unless `takes` says otherwise."""
    takes = takes or OF_KEYS.get(ours, ANYTHING)
    return Row(tuple(theirs.split()), ours, why=note, reader=reader, default=default, takes=takes)


@functools.cache
def kind_of(key: str) -> Kind:
    """What a key of ours takes, in others' words too."""
    if key not in OF_KEYS:
        return ANYTHING
    kind = OF_KEYS[key]
    return Kind(kind.needed, (lambda value: our_word(key, value), *kind.readers))


def unused(theirs: str, why: str, *, quiet: tuple[Any, ...] = (False, "none", "no")) -> Row:
    """A key without effect, and what happens instead; `quiet` values need no remark."""
    return Row(tuple(theirs.split()), why=why, verdict="no effect", asks_nothing=quiet)


def refuse(theirs: str, why: str, *, unless: tuple[Any, ...] = (False, 0, "none", "no", "")) -> Row:
    """A key that cannot be honoured, and what to do; values in `unless` ask for nothing."""
    return Row(tuple(theirs.split()), why=why, verdict="refused", asks_nothing=unless)


def part_of(theirs: str, other: str, *, takes: Kind) -> Row:
    """Keys that the row of another key reads."""
    why = f"read with {other}"
    return Row(
        tuple(theirs.split()), why=why, read_with=other, takes=takes, reader=lambda value, file: Outcome(why=why)
    )


def inherited(own: tuple[Row, ...], base: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows of another dialect for keys that these rows lack."""
    known = {spelling for row in own for spelling in row.theirs}
    return tuple(row for row in base if not known & set(row.theirs))


def ignored(why: str) -> Outcome:
    """For a reader: this value has no effect."""
    return Outcome(verdict="no effect", why=why)


def refused(why: str) -> Outcome:
    """For a reader: this value cannot be honoured."""
    return Outcome(verdict="refused", why=why)


def choice(key: str, words: Mapping[str, Any]) -> Reader:
    """A reader for a key with a few words; our value, None for one that needs no setting, or an Outcome."""

    def read(value: Any, file: File) -> Outcome | Settings:
        found = words.get(shown(value).lower(), UNSET)
        if found is UNSET:
            return refused(f"{shown(value)} is not known. Known: {', '.join(words)}.")
        if isinstance(found, Outcome):
            return found
        return {} if found is None else {key: found}

    return read


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by path as the nested mapping that a recipe is."""
    values: dict[str, Any] = {}
    for path, value in settings.items():
        *outer, last = path.split(".")
        place = values
        for step in outer:
            inner = place.get(step)
            # `model.lora: true` and then `model.lora.r: 8`: the settings replace the short form.
            place[step] = inner if isinstance(inner, dict) else {}
            place = place[step]
        if not (isinstance(place.get(last), dict) and value is True):
            place[last] = value
    return values


def _checked(key: str, value: Any) -> Any:
    """A setting of ours with a value that its key takes; null leaves it open."""
    try:
        return OF_KEYS[key].read(value) if key in OF_KEYS and value is not None else value
    except BadValue as error:
        raise error.about(key) from None


def _filled(form: Any, value: Any) -> Any:
    """A form with the value in place of each $; a list in place of [$] keeps its length."""
    if form == "$":
        return value
    if form == ["$"]:
        return [item for item in value if item != "none"]
    if isinstance(form, Mapping):
        return {key: _filled(inner, value) for key, inner in form.items()}
    return [_filled(inner, value) for inner in form] if isinstance(form, list) else form


def leaves(values: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not a mapping, with its path."""
    for key, value in values.items():
        path = f"{where}.{key}" if where else str(key)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value
