"""The reference pages, written from the product: recipe keys from the JSON schema, commands from the command line.

Must not say anything about a key or a command that the code does not say itself.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}

_RECIPE = """\
# Recipe keys

Every key that a recipe may have. A recipe states only what differs from these defaults, and every key can be set on the
command line: `optimizer.lr=3e-4`. `null` means that fullshard chooses; `fullshard train RECIPE --dry-run` prints its
choice. For completion in an editor, `fullshard recipes schema` prints the same as a JSON schema.

Where a section has several kinds, `kind:` chooses one. `kind: my_package.my_module.MyClass` is
[your own class](../own-parts.md). Where a short form is named, `section: value` is enough.
"""


def recipe_page() -> str:
    """Every key of a recipe, section by section."""
    from fullshard.commands.schema import schema
    from fullshard.recipe import Recipe

    whole = schema(Recipe)
    paths = _paths(whole)
    places = {name: found[0] for name, found in paths.items()}
    parts = [_RECIPE, "## The whole recipe", _table(whole, places)]
    for name, found in paths.items():
        parts += list(_section(name, found, whole["$defs"][name], places))
    return "\n\n".join(parts) + "\n"


def _paths(whole: Schema) -> dict[str, list[str]]:
    """Each definition with the keys that it may be written under, the shortest first."""
    found: dict[str, list[str]] = {}
    waiting = [("", whole)]
    while waiting:
        where, node = waiting.pop(0)
        for key, value in node.get("properties", {}).items():
            path = f"{where}.{key}" if where else key
            for name in _references(value):
                paths = found.setdefault(name, [])
                if path not in paths:
                    paths.append(path)
                    # Deeper uses of a section repeat its keys; one list of them is enough.
                    if len(paths) == 1:
                        waiting += [(path, shape) for shape in _shapes(whole["$defs"][name])]
    order = list(whole["properties"])
    by_place = sorted(found, key=lambda name: (order.index(found[name][0].partition(".")[0]), found[name][0]))
    return {name: found[name] for name in by_place}


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        for key in ("anyOf", "items", "additionalProperties"):
            yield from _references(node.get(key))
    elif isinstance(node, list):
        for item in node:
            yield from _references(item)


def _shapes(definition: Schema) -> list[Schema]:
    """The mappings that a definition allows: one for each kind, or one."""
    return [shape for shape in definition.get("anyOf", [definition]) if shape.get("properties")]


def _section(name: str, paths: list[str], definition: Schema, places: dict[str, str]) -> Iterator[str]:
    shapes = _shapes(definition)
    yield f'## <span id="{name.lower()}"></span>{paths[0]}'
    if paths[1:]:
        yield "Also as " + ", ".join(f"`{path}`" for path in paths[1:]) + "."
    short = [_TYPES.get(shape["type"], "list") for shape in definition.get("anyOf", []) if "properties" not in shape]
    if short:
        yield f"Short form: {', '.join(short)}."
    kinds = [shape for shape in shapes if "const" in shape["properties"].get("kind", {})]
    if not kinds:
        yield shapes[0].get("description", "")
        yield _table(shapes[0], places)
    for shape in kinds:
        kind = shape["properties"]["kind"]["const"]
        default = "" if "kind" in shape.get("required", []) else " (the default)"
        yield f"### {paths[0]}: {kind}{default}"
        yield _meaning(name, kind)
        yield _table(shape, places)


def _meaning(contract: str, kind: str) -> str:
    """The first paragraph of the docstring of a kind's class; the schema has its first line."""
    from fullshard.config.part import Part, part_class

    waiting: list[Any] = [Part]
    while waiting[0].__name__ != contract:
        waiting += waiting.pop(0).__subclasses__()
    text = inspect.getdoc(part_class(waiting[0], kind, where="")) or ""
    return _cell(text.split("\n\n")[0])


def _table(shape: Schema, places: dict[str, str]) -> str:
    rows = []
    for key, value in shape["properties"].items():
        if key != "kind":
            meaning = _cell(value.get("description", ""))
            rows.append(f"| `{key}` | {_values(value, places)} | {_default(key, value, shape)} | {meaning} |")
    return "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows]) if rows else "It has no keys."


def _values(value: Schema, places: dict[str, str]) -> str:
    """What may be written, in a word or two."""
    options = value.get("anyOf", [value])
    words = [_value(option, places) for option in options if option.get("const", "") is not False]
    return " or ".join(dict.fromkeys(words))


def _value(option: Schema, places: dict[str, str]) -> str:
    if "$ref" in option:
        name = option["$ref"].rpartition("/")[2]
        return f"[{places[name]}](#{name.lower()})"
    if "enum" in option:
        return ", ".join(f"`{choice}`" for choice in option["enum"])
    if "const" in option:
        return f"`{option['const']}`"
    kind = option.get("type")
    if kind == "array":
        items = option.get("items", {})
        return f"list of {_values(items, places)}" if items else "list"
    if kind == "object":
        return "mapping"
    if kind == "null":
        return "`null`"
    limits = {name: "2⁶³" if option[name] == 2**63 else option[name] for name in _BOUNDS if name in option}
    bounds = " and ".join(f"{_BOUNDS[name]} {limit}" for name, limit in limits.items())
    return " ".join(filter(None, (_TYPES.get(kind or "", "any value"), bounds)))


def _default(key: str, value: Schema, shape: Schema) -> str:
    if key in shape.get("required", []):
        return "required"
    if "default" not in value:
        return ""
    default = value["default"]
    return f"`{default if isinstance(default, str) and default else json.dumps(default)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


_COMMANDS = """\
# Commands

Every command with its arguments and options, as `fullshard COMMAND --help` prints them.
"""


def commands_page() -> str:
    """Every command of the command line."""
    import typer
    from typer.cli import get_docs_for_click

    from fullshard.cli import app

    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="fullshard")
    whole = get_docs_for_click(obj=command, ctx=context, indent=1, name="fullshard", title="fullshard")
    # Typer shortens the sentences of its lists of commands.
    whole = re.sub(r"^\* `([a-z-]+)`: .*\.\.\.$", lambda found: _listed(command, found[1]), whole, flags=re.MULTILINE)
    return _COMMANDS + "\n" + whole.replace("```console\n$ ", "```text\n").replace("\n\n\n", "\n\n")


def _listed(group: Any, name: str) -> str:
    """A command's line in a list, with the first sentence of its help."""
    commands = {
        **group.commands,
        **{k: v for sub in group.commands.values() for k, v in getattr(sub, "commands", {}).items()},
    }
    return f"* `{name}`: {commands[name].get_short_help_str(limit=200)}"
