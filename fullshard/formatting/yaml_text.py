"""Reads and writes YAML without its surprises.

`1e-4` is a number, dates and `12:30` are text, a duplicate key is an error, and every error names file, line and
column. Must not know what any key means.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from fullshard.errors import RecipeError

_NUMBER = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)(?:[eE][-+]?[0-9]+)?$")
_WHOLE = re.compile(r"^(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F_]+)$")
_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$")


class _Loader(yaml.SafeLoader):
    """SafeLoader without sexagesimals, octals and dates, with scientific notation."""


class _Dumper(yaml.SafeDumper):
    """Writes text so that `_Loader` reads it back as text."""


# YAML 1.1 reads 1e-4 as text and 12:30 as 750; a recipe means neither.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":int", ":float", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _WHOLE, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


@dataclass(frozen=True)
class Document:
    """A mapping read from YAML, and the line of each of its keys."""

    values: dict[str, Any]
    lines: dict[str, int]
    """Key path (`log.sinks[0].kind`, hyphens as underscores) to line number, from 1."""
    notes: tuple[str, ...] = ()
    """What a run says about the document."""
    left_out: tuple[str, ...] = ()
    """Key paths whose values another trainer's file leaves to its trainer."""


def parse(text: str, *, name: str) -> Document:
    """Reads a mapping from YAML text; `name` is what errors call the text."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise RecipeError(f"{name} is empty. A recipe needs at least `model` and `data`.")
        if not isinstance(node, yaml.MappingNode):
            found = "a list" if isinstance(node, yaml.SequenceNode) else f"the text {str(node.value)[:40]!r}"
            raise RecipeError(
                f"{name}, line {node.start_mark.line + 1}: found {found} where a mapping of keys is needed. "
                "Write each setting as `key: value`."
            )
        lines: dict[str, int] = {}
        _walk(node, "", name, lines)
        values = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise RecipeError(_in_words(error, text, name)) from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{name} cannot be read as YAML: {error}. Save it as plain text in UTF-8.") from None
    return Document(values, lines)


def parse_value(text: str, *, where: str) -> Any:
    """Reads one value from the command line: a word, a number, [a, list] or {a: mapping}; anything else is text."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        value = None if node is None else loader.construct_document(node)
    except yaml.YAMLError:
        if text.lstrip()[:1] in ("[", "{"):
            if re.search(r"[\[{,:]\s*\*", text):
                quoted = re.sub(r"([\[{,:]\s*)(\*[^\s,\]}]*)", r'\1"\2"', text)
                raise RecipeError(
                    f"{where} = {text}: YAML reads a `*` at the start of a word as an alias. Put the word in "
                    f"quotes, and the whole in quotes for the shell: {where}='{quoted}'."
                ) from None
            raise RecipeError(
                f"{where} = {text}: the list or mapping is not complete. "
                "Write [1, 2] or {key: value}, in quotes for the shell."
            ) from None
        return text
    # `a: b` and `- a` are mappings and lists in a file; on a command line they are text.
    return text if isinstance(node, yaml.CollectionNode) and not node.flow_style else value


def render(values: dict[str, Any]) -> str:
    """The YAML text of plain data, keys in the order given."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def shown(value: Any) -> str:
    """A value as a person would write it in a recipe: 3e-4, true, null, [1, 2]."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if isinstance(value, float):
        short = re.sub(r"\.?0*e\+?(-?)0*(?=\d)", r"e\1", f"{value:e}")
        short = min(f"{value:.0f}", short, key=len) if abs(value) >= 10 else short
        return short if float(short) == value and len(short) < len(repr(value)) else repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{shown(k)}: {shown(v)}" for k, v in value.items()) + "}"
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, (list, tuple)) else str(value)


def _walk(node: yaml.Node, path: str, name: str, lines: dict[str, int]) -> None:
    """Records the line of every key. A duplicate key is an error: YAML would silently keep the last one."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, f"{path}[{index}]", name, lines)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        word, line = str(key.value), key.start_mark.line + 1
        inner = f"{path}.{word.replace('-', '_')}" if path else word.replace("-", "_")
        if word in seen and key.tag != "tag:yaml.org,2002:merge":
            raise RecipeError(
                f"{name}, line {line}: the key {inner} appears twice, first in line {seen[word]}. Keep one of them."
            )
        seen[word] = line
        lines[inner] = line
        _walk(value, inner, name, lines)


def _in_words(error: yaml.MarkedYAMLError, text: str, name: str) -> str:
    mark = error.problem_mark or error.context_mark
    problem = str(error.problem or error.context or "cannot be read")
    if mark is None:
        return f"{name} cannot be read as YAML: {problem}."
    rows = text.splitlines()
    row = rows[mark.line].strip() if mark.line < len(rows) else "the end of the file"
    problem = problem.removeprefix("found ")
    hint = "Check the indentation and the colons of this line and the one before."
    if "\\t" in problem:
        problem, hint = "found a tab", "Indent with spaces."
    elif "mapping values are not allowed" in problem:
        problem = "found a second colon, or a key indented deeper than the value above it"
    elif "another document" in problem:
        problem, hint = "found a second document", "A recipe is one document: remove the line `---`."
    elif "constructor for the tag" in problem:
        hint = "A recipe holds plain values only: remove the word that starts with `!`."
    return f"{name}, line {mark.line + 1}, column {mark.column + 1}: {problem}, at `{row}`. {hint}"
