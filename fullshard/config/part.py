"""Parts: settings and behaviour in one frozen object, named in a recipe by `kind`.

A `Section` is a closed group of keys; a `Part` is open: `kind: cosine` is the file `schedules/cosine.py` of the engine
or of any family, and `kind: my_package.my_module.MyClass` is the user's own class. There is no list to keep in sync.
Must not know what any section or part means.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar, Union

from pydantic import BaseModel, ConfigDict, ValidationError

from fullshard.config import foreign_keys
from fullshard.config.families import exists, folders
from fullshard.config.problems import did_you_mean, explain, found, join, unknown_key
from fullshard.errors import RecipeError, SetupError
from fullshard.formatting.yaml_text import shown

S = TypeVar("S", bound="Section")
P = TypeVar("P", bound="Part")


class Section(BaseModel):
    """A closed group of recipe keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        populate_by_name=True,
    )

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of keys of which one may be set: `duration.steps` on the command line replaces the recipe's `epochs`."""

    @classmethod
    def from_short(cls, value: Any) -> Any:
        """Turns a short spelling (one word, a path) into the mapping it stands for; overridden where one exists."""
        return value


class Part(Section):
    """A replaceable part. Its fields are the recipe's keys, its methods the behaviour."""

    folder: ClassVar[str] = ""
    """The package whose files are the engine's own parts of this contract; a family's lie in a folder of that name."""
    default_kind: ClassVar[str | None] = None
    """The kind meant when a recipe names none."""
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
    """The module of each kind: in the engine's own folder, or in the folder of that name in a family."""
    found: dict[str, str] = {}
    for package in ([folder] if exists(folder) else []) + list(folders(folder.rpartition(".")[2])):
        for kind in _files_with_parts(package):
            if kind in found:
                raise SetupError(f"{kind!r} is both {found[kind]} and {package}.{kind}: rename one of the files.")
            found[kind] = f"{package}.{kind}"
    return found


@functools.cache
def _files_with_parts(folder: str) -> tuple[str, ...]:
    """The files of a folder that export a class with a base that is not torch's, read rather than imported: a part may
    need torch. Others help the parts."""
    found = []
    for module in pkgutil.iter_modules(importlib.import_module(folder).__path__):
        loader: Any = getattr(importlib.util.find_spec(f"{folder}.{module.name}"), "loader", None)
        if module.ispkg or module.name == "base" or not hasattr(loader, "get_source"):
            continue
        source = loader.get_source(f"{folder}.{module.name}") or ""
        exported = re.search(r"^__all__ = \[([^\]]*)\]", source, re.MULTILINE)
        names = re.findall(r"\w+", exported[1]) if exported else []
        if any(re.search(rf"^class {name}\((?!torch\.|nn\.)", source, re.MULTILINE) for name in names):
            found.append(module.name)
    return tuple(sorted(found))


def part_class(contract: type[P], kind: str, *, where: str) -> type[P]:
    """The class behind `kind`, or an error that lists what exists."""
    if (ours := foreign_keys.of_value(f"{where}.kind", kind)) and kind not in kinds(contract):
        raise RecipeError(f"{where}.kind = '{kind}' is not known. Here it is {ours}: write {where}: {{kind: {ours}}}.")
    if "." in kind:
        return _user_class(contract, kind, where=where)
    if kind not in kinds(contract):
        raise RecipeError(
            f"{where}.kind = {kind!r} is not known. Known: {', '.join(kinds(contract))}"
            f"{did_you_mean(kind, kinds(contract))}. For a class of your own write its full name: "
            "my_package.my_module.MyClass."
        )
    module = importlib.import_module(_modules(contract.folder)[kind])
    return next(
        value
        for name in module.__all__
        if isinstance(value := getattr(module, name), type) and issubclass(value, contract)
    )


def _user_class(contract: type[P], kind: str, *, where: str) -> type[P]:
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
            f"{where}.kind = {kind!r} is not a {contract.__name__}. Let the class inherit from "
            f"fullshard.{contract.__name__}."
        )
    missing = [names for names in contract.required if not _has_one(found, contract, names.split(" or "))]
    if missing:
        raise RecipeError(
            f"{where}.kind = {kind!r}: the class has no method {', no method '.join(missing)}, and a "
            f"{contract.__name__} needs it. Write it as in {contract.__module__}, which says what it takes and returns."
        )
    return found


def _has_one(cls: type[Part], contract: type[Part], methods: Sequence[str]) -> bool:
    return any(getattr(cls, method) is not getattr(contract, method) for method in methods)


def decode(cls: type[S], value: Any, *, where: str = "") -> S:
    """Checks a plain mapping against a section or part, all levels deep; every problem is told with its key path."""
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
        kind = value.pop("kind", cls.default_kind if cls.default_kind in kinds(cls) else None)
        if kind is None:
            problems.append(f"{where}.kind is missing. Known: {', '.join(kinds(cls))}.")
            return None
        if not isinstance(kind, str):
            problems.append(f"{where}.kind = {found(kind)}: it must be one word. Known: {', '.join(kinds(cls))}.")
            return None
        try:
            cls = part_class(cls, kind, where=where)
        except RecipeError as error:
            problems.append(str(error))
            return None
    names = {field.alias or name: name for name, field in cls.model_fields.items()}
    unknown = [key for key in value if key not in names]
    for key in unknown:
        problems.extend(unknown_key(where, key, value[key], sorted(names)))
    fields: dict[str, Any] = {}
    failed: set[str] = set()
    for key in (key for key in value if key not in unknown):
        known_problems = len(problems)
        fields[key] = _decode_annotated(cls.model_fields[names[key]].annotation, value[key], join(where, key), problems)
        if len(problems) > known_problems:
            # Fits no field, so that no check across fields sees half a section; its own problems are told already.
            fields[key] = _Failed()
            failed.add(key)
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        problems.extend(explain([e for e in error.errors() if not failed.intersection(e["loc"][:1])], where))
        return None
    except Exception:
        if failed:  # a part's own check met the stand-in
            return None
        raise


class _Failed:
    """Stands for a value that could not be decoded."""


def _decode_annotated(annotation: Any, value: Any, where: str, problems: list[str]) -> Any:
    """Descends into sections, lists and mappings of sections; every other value is left to pydantic."""
    options = _options(annotation)
    if value is False and type(None) in options and any(map(_is_section, options)):
        return None  # `lora: false` switches off what `lora: true` switches on
    for option in options:
        origin, arguments = typing.get_origin(option), typing.get_args(option)
        if _is_section(option) and value is not None:
            return _decode(option, value, where, problems)
        if origin in (list, tuple) and isinstance(value, list) and _is_section(arguments[0]):
            return [_decode(arguments[0], v, f"{where}[{i}]", problems) for i, v in enumerate(value)]
        if origin is dict and isinstance(value, Mapping) and _is_section(arguments[1]):
            return {k: _decode(arguments[1], v, join(where, str(k)), problems) for k, v in value.items()}
    _refuse_truth(annotation, value, where, problems)
    return value


def _refuse_truth(annotation: Any, value: Any, where: str, problems: list[str]) -> None:
    """True is no number: pydantic would read it as 1, and `--optimizer.lr` without its value would train with it."""
    options = _options(annotation)
    if isinstance(value, bool):
        if bool not in options and {int, float} & set(options):
            problems.append(f"{where} = {found(value)}: it must be a {'' if float in options else 'whole '}number.")
        return
    for option in options:
        origin, arguments = typing.get_origin(option), typing.get_args(option)
        if origin in (list, tuple) and isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                # tuple[float, float] names each place, list[float] and tuple[float, ...] one for all.
                place = index if origin is tuple and Ellipsis not in arguments else 0
                if place < len(arguments):
                    _refuse_truth(arguments[place], item, f"{where}[{index}]", problems)
        if origin is dict and isinstance(value, Mapping):
            for key, item in value.items():
                _refuse_truth(arguments[1], item, join(where, str(key)), problems)


def _options(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a type, without what is annotated to it."""
    if typing.get_origin(annotation) is Annotated:
        return _options(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return tuple(option for member in typing.get_args(annotation) for option in _options(member))
    return (annotation,)


def _is_section(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, Section)


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
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain_value, value), key=str)  # in one order on every rank
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


__all__ = ["Part", "Section", "decode", "did_you_mean", "kinds", "part_class", "plain"]
