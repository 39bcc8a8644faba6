"""Parts: settings and behaviour in one frozen object, named in a recipe by `kind`.

A part is an open section: `kind: cosine` is the file `schedules/cosine.py` of the engine or of any family, and
`kind: my_package.my_module.MyClass` is the user's own class. There is no list to keep in sync.
Must not know what any section or part means.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from fullshard.config.families import folders
from fullshard.config.problems import did_you_mean, explain, found, join, not_one_of, unknown_key
from fullshard.config.section import Section, keys_of, options
from fullshard.dialects import foreign_keys
from fullshard.errors import RecipeError, SetupError
from fullshard.formatting.yaml_text import shown

S = TypeVar("S", bound=Section)
P = TypeVar("P", bound="Part")
_FAILED = object()
"""Replaces a value that could not be decoded: it fits no field, so no check across fields sees half a section."""


class Part(Section):
    """A replaceable part. Its fields are the recipe's keys, its methods the behaviour."""

    folder: ClassVar[str] = ""
    """The package with the engine's own parts of this contract; a family has its own in a folder of the same name."""
    default_kind: ClassVar[str | None] = None
    """The kind to use if the recipe does not name one."""
    required: ClassVar[tuple[str, ...]] = ()
    """Methods that a class of this contract must have; `a or b` where one of them is enough."""

    @classmethod
    def from_short(cls, value: Any) -> Any:
        """One word is the kind."""
        return {"kind": value} if isinstance(value, str) else value

    @classmethod
    def kind(cls) -> str:
        """The name a recipe uses for this part."""
        module = cls.__module__.rpartition(".")[2]
        return module if _modules(cls.folder).get(module) == cls.__module__ else f"{cls.__module__}.{cls.__qualname__}"


def kinds(contract: type[Part]) -> list[str]:
    """The kinds of a contract that need no package name, by file name."""
    return sorted(_modules(contract.folder))


@functools.cache
def _modules(folder: str) -> dict[str, str]:
    """The module of each kind: in the engine's folder, or in the folder of the same name in a family."""
    modules: dict[str, str] = {}
    engine = [folder] if importlib.util.find_spec(folder) else []
    for package in (*engine, *folders(folder.rpartition(".")[2])):
        for kind in _files_with_parts(package):
            if kind in modules:
                raise SetupError(
                    f"kind: {kind} is ambiguous: {modules[kind]} and {package}.{kind} both provide it. Rename one of "
                    "the files, or uninstall its package."
                )
            modules[kind] = f"{package}.{kind}"
    return modules


def _files_with_parts(folder: str) -> list[str]:
    """The files of a folder whose `__all__` names a class with a base that is not torch's; the others are helpers. They
    are read, not imported: a part may need torch."""
    kinds = []
    for module in pkgutil.iter_modules(importlib.import_module(folder).__path__):
        loader: Any = getattr(importlib.util.find_spec(f"{folder}.{module.name}"), "loader", None)
        if module.ispkg or module.name == "base" or not hasattr(loader, "get_source"):
            continue
        source = loader.get_source(f"{folder}.{module.name}") or ""
        exported = re.search(r"^__all__ = \[([^\]]*)\]", source, re.MULTILINE)
        names = re.findall(r"\w+", exported[1]) if exported else []
        if any(re.search(rf"^class {name}\((?!torch\.|nn\.)", source, re.MULTILINE) for name in names):
            kinds.append(module.name)
    return kinds


def part_class(contract: type[P], kind: Any, *, where: str) -> type[P]:
    """The class behind `kind`, or an error that lists the known kinds."""
    known = ", ".join(kinds(contract))
    if kind is None:
        raise RecipeError(f"{where}.kind is missing. Known: {known}.")
    if not isinstance(kind, str):
        raise RecipeError(f"{where}.kind = {found(kind)}: it must be one word. Known: {known}.")
    if (ours := foreign_keys.of_value(f"{where}.kind", kind)) and kind not in kinds(contract):
        raise RecipeError(f"{where}.kind = '{kind}' is not known. Here it is {ours}: write {where}: {{kind: {ours}}}.")
    if "." in kind and not kind.startswith("."):
        return _user_class(contract, kind, where=where)
    if kind not in kinds(contract):
        raise RecipeError(
            f"{where}.kind = {kind!r} is not known. Known: {known}{did_you_mean(kind, kinds(contract))}. For your own "
            "class, write its full name: my_package.my_module.MyClass."
        )
    module = importlib.import_module(_modules(contract.folder)[kind])
    for value in (getattr(module, name) for name in module.__all__):
        if isinstance(value, type) and issubclass(value, contract):
            return value
    raise SetupError(f"{module.__name__}.__all__ names no {contract.__name__}. Add the class to it.")


def class_of(cls: type[Section], value: Mapping[str, Any]) -> type[Section]:
    """The class that a mapping describes; `cls` itself if its kind is missing or wrong, which decoding reports."""
    if not issubclass(cls, Part):
        return cls
    try:
        return part_class(cls, value.get("kind", cls.default_kind), where="")
    except RecipeError:
        return cls


def _user_class(contract: type[P], kind: str, *, where: str) -> type[P]:
    module_name, _, name = kind.rpartition(".")
    try:
        named = getattr(importlib.import_module(module_name), name)
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
    if not (inspect.isclass(named) and issubclass(named, contract)):
        raise RecipeError(
            f"{where}.kind = {kind!r} is not a {contract.__name__}. Let the class inherit from "
            f"fullshard.{contract.__name__}."
        )

    def is_inherited(method: str) -> bool:
        return getattr(named, method) is getattr(contract, method)

    missing = [names for names in contract.required if all(map(is_inherited, names.split(" or ")))]
    if missing:
        raise RecipeError(
            f"{where}.kind = {kind!r}: the class has no method {', no method '.join(missing)}, and a "
            f"{contract.__name__} needs it. Write it as in {contract.__module__}, which says what it takes and returns."
        )
    return named


def decode(cls: type[S], value: Any, *, where: str = "") -> S:
    """Checks a plain mapping against a section or part, at all levels; the error lists every problem by key path."""
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
        problems.append(f"{where or 'the recipe'} must be a mapping of keys, found {found(value)}.")
        return None
    value = {shown(k).replace("-", "_"): v for k, v in value.items()}
    if issubclass(cls, Part):
        default = cls.default_kind if cls.default_kind in kinds(cls) else None
        try:
            cls = part_class(cls, value.pop("kind", default), where=where)
        except RecipeError as error:
            problems.append(str(error))
            return None
    ignored = _pop_ignored(cls, value, where, problems)
    fields = _decode_keys(cls, value, where, problems)
    failed = {key for key, decoded in fields.items() if decoded is _FAILED}
    try:
        section = cls.model_validate(fields)
    except ValidationError as error:
        problems.extend(explain([e for e in error.errors() if not failed.intersection(e["loc"][:1])], where))
        return None
    except Exception:
        if failed:  # a part's own check met the placeholder
            return None
        raise
    section._ignored = ignored
    return section


def _pop_ignored(cls: type[Section], value: dict[str, Any], where: str, problems: list[str]) -> dict[str, Any]:
    """Takes out the keys that are accepted without effect; null is the same as leaving one out."""
    given = {key: value.pop(key) for key in cls.no_effect if key in value}
    for key, ignored in given.items():
        if ignored is not None and ignored not in cls.no_effect[key].allowed:
            problems.append(not_one_of(join(where, key), ignored, [shown(word) for word in cls.no_effect[key].allowed]))
    return {key: ignored for key, ignored in given.items() if ignored is not None}


def _decode_keys(cls: type[Section], value: Mapping[str, Any], where: str, problems: list[str]) -> dict[str, Any]:
    """The decoded value of each known key; _FAILED for one with a problem."""
    known = keys_of(cls)
    for key in (key for key in value if key not in known):
        problems.extend(unknown_key(where, key, value[key], sorted(known)))
    fields: dict[str, Any] = {}
    for key in (key for key in value if key in known):
        before = len(problems)
        decoded = _decode_value(known[key].annotation, value[key], join(where, key), problems)
        fields[key] = decoded if len(problems) == before else _FAILED
    return fields


def _decode_value(annotation: Any, value: Any, where: str, problems: list[str]) -> Any:
    """Descends into sections, lists and mappings; pydantic checks every other value."""
    alternatives = list(options(annotation))
    single = [option for option in alternatives if option.form == "value"]
    types = {option.type for option in single}
    if value is None or (value is False and type(None) in types and any(option.section for option in single)):
        return None  # `lora: false` switches off what `lora: true` switches on
    for option in alternatives:
        if option.form == "value" and option.section:
            return _decode(option.section, value, where, problems)
        if option.form == "list" and isinstance(value, (list, tuple)):
            # tuple[float, float] names each place, list[float] and tuple[float, ...] one for all.
            fixed = typing.get_origin(option.type) is tuple and Ellipsis not in option.items
            inner = option.items if fixed else option.items[:1] * len(value)
            pairs = enumerate(zip(inner, value, strict=False))
            decoded = [_decode_value(t, v, f"{where}[{i}]", problems) for i, (t, v) in pairs]
            return [*decoded, *value[len(inner) :]]
        if option.form == "mapping" and isinstance(value, Mapping):
            return {k: _decode_value(option.items[0], v, join(where, shown(k)), problems) for k, v in value.items()}
    if isinstance(value, bool) and bool not in types and {int, float} & types:
        # Pydantic would read it as 1, and `--optimizer.lr` without a value would train with it.
        problems.append(f"{where} = {found(value)}: it must be a {'' if float in types else 'whole '}number.")
    return value


def plain(section: Section) -> dict[str, Any]:
    """A section as plain data, with `kind` first in every part; `decode` reads it back."""
    data: dict[str, Any] = {"kind": section.kind()} if isinstance(section, Part) else {}
    for name, field in type(section).model_fields.items():
        data[field.alias or name] = _plain_value(getattr(section, name))
    return data | section._ignored


def _plain_value(value: Any) -> Any:
    if isinstance(value, Section):
        return plain(value)
    if isinstance(value, Mapping):
        return {str(k): _plain_value(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_value(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain_value, value), key=str)  # in one order on every rank
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found
