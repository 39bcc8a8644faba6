"""The options of an engine on the command line, beside the settings of the recipe.

Must not know any engine: the fields of its class are its options.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from fullshard.config.part import decode, kinds, part_class
from fullshard.config.problems import did_you_mean
from fullshard.config.section import keys_of, options
from fullshard.errors import RecipeError, SetupError
from fullshard.submit.engine import Engine

_PASSED = "passed"
"""The field of an engine that collects the options of its own tool."""


def engine_class(name: str, *, taken: Collection[str] = ()) -> type[Engine]:
    """The engine behind `--on NAME`; the options in `taken` are the command's own, and never reach it."""
    known = kinds(Engine)
    if "." not in name and name not in known:
        raise SetupError(
            f"--on {name} is not known. Known: {', '.join(known)}{did_you_mean(name, known)}. For your own class, "
            "write its full name: my_package.my_module.MyEngine."
        )
    found = part_class(Engine, name, where="--on")
    theirs = {*option_names(found), *(f"--{option}" for option in found.own_options)}
    if clash := sorted(theirs & set(taken)):
        raise SetupError(
            f"--on {name}: {clash[0]} is an option of fullshard submit itself, so the engine never gets it. Rename its "
            "field; the engine finds the value in the recipe of its request."
        )
    return found


def option_names(engine: type[Engine]) -> list[str]:
    """The options of an engine, for messages."""
    return [f"--{key.replace('_', '-')}" for key in keys_of(engine) if key != _PASSED]


def passed_names(engine: type[Engine]) -> list[str]:
    """The options of an engine's own tool, those included that have an advice instead."""
    return [f"--{name}" for name in sorted({*engine.own_options, *engine.instead})]


def describe(engine: type[Engine]) -> str:
    """The options of an engine as help."""
    fields = {key: field for key, field in keys_of(engine).items() if key != _PASSED}
    named = {f"--{key.replace('_', '-')}": " ".join((field.description or "").split()) for key, field in fields.items()}
    width = max(map(len, named), default=0) + 2
    lines = [
        " ".join((engine.__doc__ or "").split()),
        "",
        *(f"  {name:<{width}}{text}" for name, text in named.items()),
    ]
    if engine.own_options:
        own = ", ".join(f"--{name}" for name in sorted(engine.own_options))
        lines += ["", f"Passed on as they are: {own}."]
    lines += [f"--{name}: {advice}" for name, advice in sorted(engine.instead.items())]
    return "\n".join(lines)


def take(engine: type[Engine], words: Sequence[str]) -> tuple[Engine, list[str]]:
    """The engine with its options, and the words that are not its own: settings of the recipe."""
    values: dict[str, Any] = {}
    rest, left = [], deque(words)
    while left:
        word = left.popleft()
        if long := engine.short.get(word[1:2]) if re.match(r"-[A-Za-z]", word) else None:
            raise SetupError(f"{word}: options have long names here. {engine.instead.get(long) or f'Write --{long}.'}")
        name, equals, value = word.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        if word.startswith("--") and (advice := engine.instead.get(name.replace("_", "-"))):
            raise SetupError(f"--{name} cannot be given here. {advice}")
        switch = _switch(engine, key) if word.startswith("--") else None
        if switch is not None:
            if equals:
                raise SetupError(f"{word}: --{name} takes no value.")
            _set(values, *switch, engine=engine, word=word)
        elif word.startswith("--") and _takes_value(engine, key):
            if not equals and (not left or left[0].startswith("--")):
                raise SetupError(f"--{name} needs a value.")
            _set(values, key, value if equals else left.popleft(), engine=engine, word=f"--{name}")
        else:
            rest.append(word)
    return _decoded(engine, values), rest


def _switch(engine: type[Engine], key: str) -> tuple[str, Any] | None:
    """The field and value of an option without a value: `--requeue`, `--no-requeue`, `--exclusive`."""
    fields = keys_of(engine)
    for field, value in ((key, True), (key.removeprefix("no_"), False)):
        if field in fields and fields[field].annotation is bool and (value or field != key):
            return field, value
    return (key, None) if engine.own_options.get(key.replace("_", "-")) is False else None


def _takes_value(engine: type[Engine], key: str) -> bool:
    fields = keys_of(engine)
    ours = key in fields and key != _PASSED and fields[key].annotation is not bool
    return ours or engine.own_options.get(key.replace("_", "-")) is True


def _set(values: dict[str, Any], key: str, value: Any, *, engine: type[Engine], word: str) -> None:
    """Adds to a list; anything else may be given once."""
    fields = keys_of(engine)
    if key not in fields:
        name = f"--{key.replace('_', '-')}"
        values.setdefault(_PASSED, []).append(name if value is None else f"{name}={value}")
    elif any(option.form == "list" for option in options(fields[key].annotation)):
        values.setdefault(key, []).append(value)
    elif values.setdefault(key, value) != value:
        raise SetupError(f"{word} is given twice. Give it once.")


def _decoded(engine: type[Engine], values: dict[str, Any]) -> Engine:
    """The engine's settings; a problem names the option as it was typed."""
    try:
        return decode(engine, {"kind": engine.kind(), **values}, where="engine")
    except RecipeError as error:
        named = re.sub(r"engine\.(\w+)(\[\d+\])?( =)?", lambda m: f"--{m[1].replace('_', '-')}", str(error))
        needs = rf"--on {engine.kind()} needs \1. fullshard submit --help-on {engine.kind()} explains it."
        raise SetupError(re.sub(r"(--[\w-]+) is missing\. Add it to the recipe\.", needs, named)) from None
