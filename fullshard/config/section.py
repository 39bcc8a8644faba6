"""Sections, the closed groups of recipe keys, and one walk over the types of their keys.

Merging, decoding and the schema all ask where sections are inside a type such as `Wrap | None`, `list[Sink]` or
`dict[str, Tower]`. Must not know what any section means.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, Union

from pydantic import BaseModel, ConfigDict, PrivateAttr, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from fullshard.dialects.foreign_keys import NoEffect


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
    no_effect: ClassVar[Mapping[str, NoEffect]] = {}
    """Keys of other trainers that are accepted here and do nothing."""
    _ignored: dict[str, Any] = PrivateAttr(default_factory=dict)
    """The values given for them."""

    @classmethod
    def from_short(cls, value: Any) -> Any:
        """Turns a short form (one word, a path) into a mapping; overridden by sections that have one."""
        return value

    @model_validator(mode="after")
    def _one_of_each_group(self) -> Self:
        """In Python as well as in a recipe."""
        fields = {info.alias or name: name for name, info in type(self).model_fields.items()}
        for group in self.exclusive:
            given = [key for key in group if getattr(self, fields[key]) not in (None, False)]
            if len(given) > 1:
                raise PydanticCustomError("exclusive", "{keys} exclude each other", {"keys": given})
        return self


@dataclass(frozen=True)
class Option:
    """One alternative of a key's type."""

    type: Any
    form: Literal["value", "list", "mapping"] = "value"
    items: tuple[Any, ...] = ()
    """The types of the elements of a list or tuple, or of the values of a mapping."""

    @property
    def section(self) -> type[Section] | None:
        """The section that it holds: itself, or each element."""
        held = self.type if self.form == "value" else self.items[0]
        return held if inspect.isclass(held) and issubclass(held, Section) else None


def options(annotation: Any) -> Iterator[Option]:
    """The alternatives of a type, in order, without what Annotated adds to them."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        yield from options(arguments[0])
    elif origin in (Union, types.UnionType):
        for member in arguments:
            yield from options(member)
    elif origin in (list, tuple):
        yield Option(annotation, "list", arguments)
    elif origin is dict:
        yield Option(annotation, "mapping", arguments[1:])
    else:
        yield Option(annotation)


def keys_of(cls: type[Section] | None) -> dict[str, FieldInfo]:
    """The keys of a section as a recipe writes them, each with its field."""
    return {} if cls is None else {field.alias or name: field for name, field in cls.model_fields.items()}


def section_at(cls: type[Section] | None, key: str, form: str = "value") -> type[Section] | None:
    """The section that a key, or each element of its list or mapping, holds; None for plain values."""
    field = keys_of(cls).get(key)
    found = options(field.annotation) if field else ()
    return next((option.section for option in found if option.form == form and option.section), None)


def without_effect(section: Section) -> list[str]:
    """A line for each key that is set but has no effect, in this section and those inside it."""
    notes = [section.no_effect[key].note_for(value) for key, value in section._ignored.items()]
    inner = (getattr(section, name) for name in type(section).model_fields)
    return [
        *filter(None, notes),
        *(line for each in inner if isinstance(each, Section) for line in without_effect(each)),
    ]
