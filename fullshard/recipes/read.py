"""From a recipe file or a built-in name, presets and the command line to one checked Recipe.

Command line over recipe over presets over default; the run says what replaced what. The user's file is never changed.
Relative paths in a recipe are relative to the current directory. Must not know torch or any part."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any

from fullshard.config import families
from fullshard.config.merge import Settings, parse_override
from fullshard.config.part import decode, plain
from fullshard.dialects import files, presets
from fullshard.dialects.words import in_our_words
from fullshard.errors import RecipeError
from fullshard.formatting.yaml_text import Document, parse, render
from fullshard.recipe import Recipe
from fullshard.stages.expand import expanded, named, replaced_in, require_names
from fullshard.stages.place import Place

COMMAND_LINE = "command line"
RUN_KEY = "run"
"""The key of a resolved recipe that says where it came from; not a setting."""
_VERSIONS = ("fullshard", "torch", "transformers", "peft", "datasets", "tokenizers", "safetensors", "pydantic", "numpy")


def key_of(override: str) -> str:
    """The key path of a setting, with underscores."""
    return override.partition("=")[0].replace("-", "_")


@dataclass(frozen=True)
class Typed:
    """A command line: the command with the recipe and the options of its ranks, and the settings as `key=value`."""

    command: tuple[str, ...]
    settings: tuple[str, ...] = ()

    def again(self, *changes: str, resume: str | None = None) -> str:
        """The same command with some settings changed, quoted for a shell."""
        left = {key_of(change): change for change in changes}
        kept = [left.pop(key_of(setting), setting) for setting in self.settings]
        options = ["--resume", resume] if resume else []
        return shlex.join([*self.command, *options, *kept, *left.values()])


@dataclass(frozen=True)
class Reading:
    """A recipe and where it came from."""

    recipe: Recipe
    name: str
    """The file or built-in name that was given; empty for a recipe made in Python."""
    source: str
    """The same for messages: the file, `built-in recipe NAME`, or `a mapping`."""
    overridden: tuple[str, ...] = ()
    """One line per setting of the command line or a preset: what replaced what."""
    presets: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    typed: Typed | None = None
    """The command line in parts, to be repeated with other settings; None for a recipe made in Python."""
    place: Place | None = None
    """The place of a stage in its run."""
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """`overridden` of each stage."""


def read_recipe(source: str | Path | Mapping[str, Any], *overrides: str, preset: str | Sequence[str] = ()) -> Recipe:
    """Reads a recipe: a YAML path, a built-in name or a mapping; settings like "optimizer.lr=3e-4" win over it, and it
    wins over presets."""
    return read(source, *overrides, preset=preset).recipe


def read(
    source: str | Path | Mapping[str, Any],
    *overrides: str,
    preset: str | Sequence[str] = (),
    typed: Typed | None = None,
    notes: Sequence[str] = (),
    launch_file: str | None = None,
) -> Reading:
    """Reads a recipe as `read_recipe` does, and keeps where its values came from, after `notes` of the caller. What a
    launcher says (`accelerate launch`, or its file) fills in what the recipe leaves open; its ranks are in force."""
    name, document = _open(source)
    run = document.values.get(RUN_KEY)
    settings = Settings(Recipe)
    parsed = [parse_override(text) for text in overrides]
    require_names(document, parsed)
    preset = [preset] if isinstance(preset, str) else preset
    under = presets.chosen(document.values, parsed, preset)
    launchers = files.launchers(launch_file, os.environ)
    for one in under:
        settings.lay(presets.values_of(one, source), f"preset {one}")
    for done in launchers:
        settings.lay(done.layers(document.left_out)[0], done.name)
    settings.lay({key: value for key, value in document.values.items() if key not in (RUN_KEY, presets.KEY)}, "recipe")
    for done in launchers:
        settings.lay(done.layers(document.left_out)[1], done.name)
    for path, value in parsed:
        if path != (presets.KEY,):
            settings.set(path, value, COMMAND_LINE)
    said = (*notes, *document.notes, *in_our_words(settings.values))
    replaced = files.notes_of(launchers, settings.replaced)
    try:
        recipe = decode(Recipe, expanded(settings))
    except RecipeError as error:
        placed = (_placed(problem, settings.origins, name, document.lines) for problem in str(error).splitlines())
        raise RecipeError("\n".join(placed)) from None
    if isinstance(run, Mapping) and run.get("handed_on"):
        typed = Typed(*map(tuple, run["typed"])) if run["typed"] else None
        overridden, lain, command = (tuple(run[key]) for key in ("overridden", "presets", "command"))
        place = Place.read(run["stage"])
        return Reading(recipe, run["name"], run["source"], overridden, lain, command, typed, place)
    asked = "" if isinstance(source, Mapping) else str(source)
    if asked and typed is None:
        typed = Typed(("fullshard", "train", asked, *(w for one in preset for w in ("--preset", one))), overrides)
    own = {stage: (*said, *files.notes_of(launchers, lines)) for stage, lines in replaced_in(settings).items()}
    return Reading(recipe, asked, name, (*said, *replaced), tuple(under), tuple(sys.argv), typed, notes=own)


def hand_on(reading: Reading, path: Path) -> None:
    """Writes a recipe for the ranks of this run; reading it gives them this same Reading."""
    for where, kind in _kinds(plain(reading.recipe), ""):
        if kind.startswith("__main__.") or "<locals>" in kind:
            raise RecipeError(
                f"{where}.kind = {kind!r}: this class exists in this session only, and other ranks cannot import it. "
                "Put it at the top level of a file, say my_parts.py, and import it from there; or train on one device."
            )
    typed = [list(reading.typed.command), list(reading.typed.settings)] if reading.typed else None
    save_resolved(reading.recipe, path, facts={**run_facts(reading), "handed_on": True, "typed": typed})


def _kinds(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Every kind in plain settings, with its key path."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _kinds(item, f"{where}[{index}]")
    if isinstance(value, Mapping):
        if "kind" in value:
            yield where, str(value["kind"])
        for key, item in value.items():
            yield from _kinds(item, f"{where}.{key}" if where else str(key))


def save_resolved(recipe: Recipe, path: Path, *, facts: Mapping[str, Any]) -> None:
    """Writes every value, and under `run` the facts; the file is a recipe that repeats the run."""
    text = (
        "# Every value of this run, defaults included. It is a recipe too: fullshard train THIS_FILE repeats the run.\n"
    )
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(text + render({**plain(recipe), RUN_KEY: dict(facts)}), encoding="utf-8")
    part.replace(path)


def run_facts(reading: Reading) -> dict[str, Any]:
    """Versions, git commit, command line and what was overridden: the `run` key of a resolved recipe."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in _VERSIONS:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "name": reading.name,
        "source": reading.source,
        "presets": list(reading.presets),
        "stage": reading.place.plain() if reading.place else None,
        "overridden": list(reading.overridden),
        "command": list(reading.command),
        "folder": str(Path.cwd()),
        "git_commit": _git_commit(),
        "versions": versions,
    }


def _open(source: str | Path | Mapping[str, Any]) -> tuple[str, Document]:
    if isinstance(source, Mapping):
        return "a mapping", named(Document(dict(source), {}))
    path = Path(os.path.expanduser(source))
    known = families.recipes()
    # os.path.isfile returns False where Path raises: for a name that is too long.
    if os.path.isfile(path):
        return str(source), named(files.as_recipe(files.load(source, _text(path)), name=str(source), path=path))
    if isinstance(source, str) and source in known:
        name = f"built-in recipe {source}"
        return name, named(parse(_text(known[source]), name=name))
    raise RecipeError(_not_found(str(source), path, list(known)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{path}: byte {error.start} is not UTF-8 text. A recipe is YAML text; save it in UTF-8."
        ) from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}. Check its permissions.") from None


def _not_found(source: str, path: Path, known: list[str]) -> str:
    if os.path.isdir(path):
        resolved = path / "recipe.resolved.yaml"
        advice = f"Use {resolved}." if resolved.is_file() else "Name the YAML file inside it."
        return f"{source} is a folder, and a recipe is a YAML file. {advice}"
    beside = path.parent.glob("[!.]*.y*ml") if os.path.isdir(path.parent) else []
    there = sorted(file.name for file in beside if _looks_like_a_recipe(file))
    names = get_close_matches(path.stem, known, n=1)
    files = get_close_matches(path.name, there, n=3) or ([] if names else there[:3])
    near = [*(str(path.parent / file) for file in files), *names]
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"{source} is neither a file nor a built-in recipe.{meant} Built-in recipes: {', '.join(known)}."


def _looks_like_a_recipe(path: Path) -> bool:
    """Whether a YAML file has at least two keys of a recipe; a file of another tool may share one."""
    try:
        keys = re.findall(r"^(\w+):", path.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return False
    return len(Recipe.model_fields.keys() & set(keys)) > 1


def _placed(problem: str, origins: Mapping[str, str], name: str, lines: Mapping[str, int]) -> str:
    """A problem with its place in front: a line of the file, the command line, or a preset."""
    found = re.match(r"[\w.\[\]]+", problem)
    path = found.group() if found else ""
    while path:
        if origins.get(path, "recipe") != "recipe":
            return f"{origins[path]}: {problem}"
        inside = [origin for key, origin in origins.items() if key == path or key.startswith((f"{path}.", f"{path}["))]
        if inside and all(origin != "recipe" for origin in inside):
            return f"{inside[0]}: {problem}"
        if path in lines:
            return f"{name}, line {lines[path]}: {problem}"
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return f"{name}: {problem}"


def _git_commit() -> str | None:
    """The commit of the current folder, marked when files differ from it; None outside a repository."""
    try:
        done = [
            subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{done[0]} with uncommitted changes" if done[1] else done[0]
