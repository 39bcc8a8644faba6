"""The JSON schema of a recipe, for editors: completion, descriptions and errors while you type.

Closed sections forbid other keys; a part is one of its built-in kinds or, by a dotted name, the user's own. Generated
from the sections, so there is nothing to keep in sync. Must not know what any section or part means.
"""

from __future__ import annotations

import inspect
from typing import Any

from fullshard.config.part import Part, Section, kinds, part_class
from fullshard.config.section import keys_of, options

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema(recipe: type[Section]) -> dict[str, Any]:
    """The JSON schema of a whole recipe."""
    definitions: dict[str, Any] = {}
    whole = _object(recipe, definitions)
    # Every resolved recipe has it; reading drops it.
    # A stage states what differs from the settings beside `stages`, which need not be complete then.
    definitions[recipe.__name__].pop("required")
    whole["anyOf"] = [{"required": whole.pop("required")}, {"required": ["stages"]}]
    whole["properties"]["run"] = {"type": "object", "description": "Where a resolved recipe came from; not a setting."}
    whole["properties"]["presets"] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    return {"$schema": _DIALECT, "title": "fullshard recipe", **whole, "$defs": definitions}


def _object(
    cls: type[Section], definitions: dict[str, Any], *, kind: str | None = None, named: bool = True
) -> dict[str, Any]:
    """One section, or one kind of a part; `named`: it must have the key `kind`."""
    own = cls.model_json_schema(by_alias=True, ref_template="#/$defs/{model}")
    own = own if "properties" in own else own["$defs"][cls.__name__]  # a recipe may hold recipes
    properties: dict[str, Any] = {} if kind is None else {"kind": {"const": kind, "description": _first_line(cls)}}
    required = ["kind"] if kind is not None and named else []
    for key, spec in keys_of(cls).items():
        properties[key] = _section_property(spec.annotation, definitions) or dict(own["properties"][key])
        if spec.description:
            properties[key]["description"] = inspect.cleandoc(spec.description)
        if spec.is_required():
            required.append(key)
    for key, ignored in cls.no_effect.items():
        properties[key] = {"enum": [*ignored.allowed, None], "description": ignored.help}
    result = {
        "type": "object",
        "description": _first_line(cls),
        "properties": properties,
        "additionalProperties": False,
    }
    return {**result, "required": required} if required else result


def _section_property(annotation: Any, definitions: dict[str, Any]) -> dict[str, Any] | None:
    """The schema of a field that holds sections, or None for a plain value, which pydantic describes."""
    alternatives: list[dict[str, Any]] = []
    found = list(options(annotation))
    for option in found:
        if option.section and option.form == "value":
            alternatives.append(_reference(option.section, definitions))
        elif option.section and option.form == "list":
            alternatives.append({"type": "array", "items": _reference(option.section, definitions)})
        elif option.section:
            alternatives.append({"type": "object", "additionalProperties": _reference(option.section, definitions)})
        elif option.type is type(None):
            alternatives += [{"type": "null"}, {"const": False}]
    if not any(option.section for option in found):
        return None
    return dict(alternatives[0]) if len(alternatives) == 1 else {"anyOf": alternatives}


def _reference(cls: type[Section], definitions: dict[str, Any]) -> dict[str, Any]:
    name = cls.__name__
    if name not in definitions:
        definitions[name] = {}  # a part may hold parts of the same contract
        alternatives = _kinds(cls, definitions) if issubclass(cls, Part) else [_object(cls, definitions)]
        alternatives += [{"type": shape} for shape, example in _SHORT.items() if _takes(cls, example)]
        definitions[name] = alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}
    return {"$ref": f"#/$defs/{name}"}


def _kinds(contract: type[Part], definitions: dict[str, Any]) -> list[dict[str, Any]]:
    built_in = [
        _object(
            part_class(contract, kind, where=contract.__name__),
            definitions,
            kind=kind,
            named=kind != contract.default_kind,
        )
        for kind in kinds(contract)
    ]
    own = {
        "type": "object",
        "description": "Your own class, by its full name: my_package.my_module.MyClass.",
        "properties": {"kind": {"type": "string", "pattern": r"\."}},
        "required": ["kind"],
    }
    return [*built_in, own]


_SHORT: dict[str, Any] = {"string": "x", "array": ["x"], "boolean": True, "integer": 1, "number": 0.5}


def _takes(cls: type[Section], example: Any) -> bool:
    """Whether a section has a short form of this shape."""
    return isinstance(cls.from_short(example), dict)


def _first_line(cls: type[Section]) -> str:
    return (inspect.getdoc(cls) or cls.__name__).splitlines()[0]
