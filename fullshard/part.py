"""Parts: settings and behaviour in one frozen object, named in a recipe by `kind`.

A `Section` is a closed group of keys; a `Part` is open: `kind: cosine` is the file `schedules/cosine.py`, and
`kind: my_package.my_module.MyClass` is the user's own class. There is no list of parts to keep in sync.
Must not know what any section or part means.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar, Union

from pydantic import BaseModel, ConfigDict, ValidationError

from fullshard.errors import RecipeError


S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """A closed group of recipe keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True, allow_inf_nan=False, populate_by_name=True
    )

    @classmethod
    def from_short(cls, value: Any) -> Any:
        """Turns a short spelling (one word, a path) into the mapping it stands for; overridden where one exists."""
        return value


class Part(Section):
    """A replaceable part. Its fields are the recipe's keys, its methods the behaviour."""

    folder: ClassVar[str] = ""
    """The package whose files are the built-in parts of this contract."""
    default_kind: ClassVar[str | None] = None
    """The kind meant when a recipe names none."""

    @classmethod
    def kind(cls) -> str:
        """The name a recipe uses for this part."""
        package, _, module = cls.__module__.rpartition(".")
        return module if package == cls.folder else f"{cls.__module__}.{cls.__qualname__}"


def kinds(contract: type[Part]) -> list[str]:
    """The built-in kinds of a contract, by file name."""
    package = importlib.import_module(contract.folder)
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name != "base" and not m.ispkg)


def part_class(contract: type[Part], kind: str, *, where: str) -> type[Part]:
    """The class behind `kind`, or an error that lists what exists."""
    if "." in kind:
        return _user_class(contract, kind, where=where)
    if kind not in kinds(contract):
        raise RecipeError(
            f"{where}.kind = {kind!r} is not known. Known: {', '.join(kinds(contract))}"
            f"{did_you_mean(kind, kinds(contract))}. For a class of your own write its full name: my_package.my_module.MyClass."
        )
    module = importlib.import_module(f"{contract.folder}.{kind}")
    return next(
        value
        for name in module.__all__
        if isinstance(value := getattr(module, name), type) and issubclass(value, contract)
    )


def _user_class(contract: type[Part], kind: str, *, where: str) -> type[Part]:
    module_name, _, name = kind.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"{where}.kind = {kind!r}: the module {error.name!r} cannot be imported. "
            "Install it, or put its folder on PYTHONPATH."
        ) from error
    except AttributeError as error:
        names = [n for n in dir(importlib.import_module(module_name)) if not n.startswith("_")]
        raise RecipeError(
            f"{where}.kind = {kind!r}: the module {module_name} has no {name!r}{did_you_mean(name, names)}."
        ) from error
    if not (inspect.isclass(found) and issubclass(found, contract)):
        raise RecipeError(
            f"{where}.kind = {kind!r} is not a {contract.__name__}. Let the class inherit from fullshard.{contract.__name__}."
        )
    return found


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """` (did you mean 'x'?)`, or nothing when no known word is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def decode(cls: type[S], value: Any, *, where: str = "") -> S:
    """Checks a plain mapping against a section or part, all levels deep; every problem is reported with its key path."""
    problems: list[str] = []
    decoded = _decode(cls, value, where, problems)
    if problems:
        raise RecipeError("\n".join(dict.fromkeys(problems)))
    return typing.cast(S, decoded)


def _decode(cls: type[Section], value: Any, where: str, problems: list[str]) -> Any:
    if isinstance(value, Section):
        return value
    value = cls.from_short(value)
    if not isinstance(value, Mapping):
        problems.append(f"{where or 'the recipe'} must be a mapping of keys, found {_show(value)}.")
        return None
    value = {str(k).replace("-", "_"): v for k, v in value.items()}
    if issubclass(cls, Part):
        kind = value.pop("kind", cls.default_kind)
        if kind is None:
            problems.append(f"{where}.kind is missing. Known: {', '.join(kinds(cls))}.")
            return None
        try:
            cls = part_class(cls, str(kind), where=where)
        except RecipeError as error:
            problems.append(str(error))
            return None
    names = {field.alias or name: name for name, field in cls.model_fields.items()}
    unknown = [key for key in value if key not in names]
    for key in unknown:
        known = sorted(names)
        problems.append(
            f"{_join(where, key)} is not a known key{did_you_mean(key, known)}. Known here: {', '.join(known)}."
        )
    fields = {
        key: _decode_annotated(cls.model_fields[names[key]].annotation, item, _join(where, key), problems)
        for key, item in value.items()
        if key not in unknown
    }
    if problems and unknown:
        return None
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        problems.extend(_explain(entry, where) for entry in error.errors())
        return None


def _decode_annotated(annotation: Any, value: Any, where: str, problems: list[str]) -> Any:
    """Descends into sections, lists and mappings of sections; every other value is left to pydantic."""
    options = typing.get_args(annotation) if typing.get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    for option in options:
        origin, arguments = typing.get_origin(option), typing.get_args(option)
        if inspect.isclass(option) and issubclass(option, Section) and value is not None:
            return _decode(option, value, where, problems)
        if origin in (list, tuple) and isinstance(value, list) and _is_section(arguments[0]):
            return [_decode(arguments[0], v, f"{where}[{i}]", problems) for i, v in enumerate(value)]
        if origin is dict and isinstance(value, Mapping) and _is_section(arguments[1]):
            return {k: _decode(arguments[1], v, _join(where, str(k)), problems) for k, v in value.items()}
    return value


def _is_section(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, Section)


def _explain(entry: Any, where: str) -> str:
    path = where
    for step in entry["loc"]:
        # pydantic adds the names of union members to the path; they are types, not keys.
        if isinstance(step, int):
            path = f"{path}[{step}]"
        elif step.isidentifier() and step not in {"str", "int", "float", "bool", "list", "dict", "none"}:
            path = _join(path, step)
    if entry["type"] == "missing":
        return f"{path} is missing. Add it to the recipe."
    message = entry["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{path} = {_show(entry['input'])}: {message[:1].lower()}{message[1:].rstrip('.')}."


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def plain(section: Section) -> dict[str, Any]:
    """A section as plain data, with `kind` first in every part: what `decode` takes back."""
    data: dict[str, Any] = {"kind": section.kind()} if isinstance(section, Part) else {}
    for name, field in type(section).model_fields.items():
        data[field.alias or name] = _plain_value(getattr(section, name))
    return data


def _plain_value(value: Any) -> Any:
    if isinstance(value, Section):
        return plain(value)
    if isinstance(value, Mapping):
        return {str(k): _plain_value(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_value(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


__all__ = ["Part", "Section", "decode", "did_you_mean", "kinds", "part_class", "plain"]
