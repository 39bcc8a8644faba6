"""Reads the conversation of a record into the form that chat templates expect: Transformers' messages and tools.

Data sets use other names for roles, JSON inside strings, and nulls for missing keys. Must not know templates, tokens,
files or ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fullshard.config.problems import sort_of
from fullshard.contracts.data import Record
from fullshard.errors import DataError

Message = dict[str, Any]

LISTS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Columns with a whole conversation, and their keys for the speaker and the text."""
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "function": "tool",
}
CALLS = ("function_call", "tool_call")
"""Roles of messages whose text is a tool call in JSON."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys for the reasoning before an answer; Transformers treats them alike."""

_CALL_FORM = '{"name": "...", "arguments": {...}}'
_RESERVED = {
    *LISTS,
    *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("return_assistant_tokens_mask", "self"),
    *("cycler", "dict", "joiner", "lipsum", "namespace", "raise_exception", "range", "strftime_now"),
}
"""Columns that are not template variables: the conversation, rendering options, and functions of the template."""


def read_messages(value: Any, *, column: str) -> list[Message]:
    """The messages of a conversation, without nulls."""
    speaker, said = LISTS[column]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(f"{column!r} must be a list of at least one {{{speaker}, {said}}}.")
    return [_message(entry, f"message {n}", speaker=speaker, said=said) for n, entry in enumerate(value, start=1)]


def read_variables(record: Record, *, used: Sequence[str]) -> dict[str, Any]:
    """All columns that the template may read; `used` ones are in the messages already."""
    more = record.get("chat_template_kwargs")
    more = _from_json(more, "'chat_template_kwargs'") if isinstance(more, str) else more
    if more is not None and not isinstance(more, Mapping):
        raise DataError(f"'chat_template_kwargs' must be an object, found {sort_of(more)}.")
    columns = {**record, **(more or {})}
    found = {k: v for k, v in columns.items() if v is not None and k not in _RESERVED and k not in used}
    if "tools" in found:
        found["tools"] = _objects(found["tools"], "'tools'")
        for tool in found["tools"]:
            _read_parameters(tool)
    if "documents" in found:
        found["documents"] = _documents(found["documents"])
    # Templates test whether tools are defined; an empty list would count.
    return {key: value for key, value in found.items() if key not in ("tools", "documents") or value}


def to_json(value: Any) -> str:
    """A value as JSON on one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def joined(content: Any) -> str:
    """The text of a message's content, which may be a list of parts."""
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        return "".join(str(part["text"]) for part in content)
    return "" if content is None else to_json(content)


def _message(entry: Any, where: str, *, speaker: str, said: str) -> Message:
    if not isinstance(entry, Mapping) or entry.get(speaker) is None:
        found = ", ".join(map(repr, entry)) if isinstance(entry, Mapping) else sort_of(entry)
        raise DataError(f"{where} must have {speaker!r} and {said!r}, found {found}.")
    given = entry[speaker]
    is_call = given in CALLS
    role = "assistant" if is_call else ALIASES.get(given, given) if isinstance(given, str) else None
    if role not in ROLES:
        allowed = (*ROLES, *(name for name in ALIASES if name not in ROLES), *CALLS)
        raise DataError(f"{where} has the role {given!r}. Allowed: {', '.join(allowed)}.")
    message = {"role": role, "content": entry.get(said)}
    message |= {key: value for key, value in entry.items() if key not in (speaker, said) and value is not None}
    if is_call:
        calls = _from_json(message["content"], f"{where}: {said!r}", form=_CALL_FORM)
        message |= {"content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
    if message.get("tool_calls"):
        message["tool_calls"] = _read_calls(message["tool_calls"], where)
    elif "tool_calls" in message:
        del message["tool_calls"]
    return _with_content(message, entry, where, said=said)


def _with_content(message: Message, entry: Mapping[str, Any], where: str, *, said: str) -> Message:
    content = message["content"]
    if content is None:
        if not any(message.get(key) for key in ("tool_calls", "function_call", *REASONING)):
            if said in entry:
                raise DataError(f"{where}: {said!r} is null, and the message has no other content.")
            raise DataError(f"{where} must have 'role' and {said!r}, found {', '.join(map(repr, entry))}.")
        # No key, since null in a table means missing; rendering adds it for templates that need it.
        return {key: value for key, value in message.items() if key != "content"}
    if isinstance(content, str) or (message["role"] in ("tool", "ipython") and isinstance(content, (Mapping, list))):
        return message
    if not isinstance(content, list) or not content:
        raise DataError(f"{where}: {said!r} must be a string, found {sort_of(content)}.")
    return {**message, "content": [_part(part, where) for part in content]}


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if kind is None:
        raise DataError(f'{where}: a part of the content must be an object like {{"type": "text", "text": "..."}}.')
    if kind != "text" or not isinstance(part.get("text"), str):
        raise DataError(f"{where} has a part of type {kind!r}, and a language model reads only text parts.")
    return {"type": "text", **{key: value for key, value in part.items() if value is not None}}


def _read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as an object; templates write them as JSON."""
    found = []
    for number, call in enumerate(_objects(calls, f"{where}: 'tool_calls'"), start=1):
        place = f"{where}, tool call {number}"
        function = call.get("function", {key: call[key] for key in ("name", "arguments") if key in call})
        function = _from_json(function, f"{place}: 'function'") if isinstance(function, str) else function
        function = {k: v for k, v in function.items() if v is not None} if isinstance(function, Mapping) else None
        if function is None or not isinstance(function.get("name"), str):
            raise DataError(f"{place} must have a function like {_CALL_FORM}, found {to_json(call)[:80]}.")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _from_json(arguments, f"{place}: 'arguments'") if arguments.strip() else {}
        if not isinstance(arguments, Mapping | None):
            raise DataError(f"{place}: 'arguments' must be an object, found {sort_of(arguments)}.")
        rest = {key: value for key, value in call.items() if key not in ("name", "arguments") and value is not None}
        found.append({"type": "function", **rest, "function": {**function, "arguments": dict(arguments or {})}})
    return found


def _read_parameters(tool: dict[str, Any]) -> None:
    """Parses a schema that a table holds as a string."""
    for holder in (tool, tool.get("function")):
        if isinstance(holder, dict) and isinstance(holder.get("parameters"), str):
            holder["parameters"] = _from_json(holder["parameters"], "'tools': 'parameters'")


def _documents(value: Any) -> list[dict[str, Any]]:
    """Documents as objects with a text, as templates expect; converts plain texts."""
    try:
        return _objects(value, "'documents'")
    except DataError:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise
        return [{"text": text} for text in texts]


def _objects(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of objects; each of them, or the whole list, may be JSON in a string."""
    value = _from_json(value, where) if isinstance(value, str) and value.strip() else value or []
    entries = [value] if isinstance(value, Mapping) else value
    if not isinstance(entries, list):
        raise DataError(f"{where} must be a list of objects, found {sort_of(value)}.")
    entries = [_from_json(entry, where) if isinstance(entry, str) else entry for entry in entries]
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise DataError(f"{where} must be a list of objects, found {sort_of(entry)} in it.")
    return [_copied(entry) for entry in entries]


def _copied(value: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy, so that changes do not affect the record."""
    return {key: _copied(inner) if isinstance(inner, Mapping) else inner for key, inner in value.items()}


def _from_json(text: Any, where: str, *, form: str = "") -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        like = f" like {form}" if form else ""
        raise DataError(f"{where} must be JSON{like}, found {str(text)[:60]!r}: {error}.") from error


__all__ = ["ALIASES", "LISTS", "REASONING", "ROLES", "Message", "joined", "read_messages", "read_variables", "to_json"]
