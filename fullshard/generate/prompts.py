"""The prompts of a command line and of files. Must not know models, ranks or how a prompt is laid out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.errors import DataError, SetupError

Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One text or conversation to continue."""

    text: str
    """As it was given, to be shown."""
    messages: list[Message] | None = None
    """None: plain text, or one user message where the run was trained on conversations."""


def gathered(texts: Sequence[str], files: Sequence[str], conversations: Sequence[str], *, spoken: bool) -> list[Prompt]:
    """All prompts of a command line, in the order of the options. A clip may come without a text: it may hold the
    question, or be what is to be written down."""
    found = [Prompt(text) for text in texts]
    for name in files:
        found += _of_file(name)
    found += [_conversation(text) for text in conversations]
    if not found and not spoken:
        raise SetupError(
            "there is no prompt. Give --prompt TEXT, --prompts FILE (one per line, or .jsonl), or "
            '--messages \'[{"role": "user", "content": "..."}]\'.'
        )
    if any(not prompt.text for prompt in found):
        raise SetupError("--prompt: the text is empty. Give at least one word.")
    return found or [Prompt("")]


def _read(name: str, option: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{option} {name} cannot be read ({error}). Check its name.") from error


def _of_file(name: str) -> list[Prompt]:
    """One prompt per line; in .jsonl a line is a string, or has `prompt`, `text` or `messages`."""
    lines = [line for line in _read(name, "--prompts").splitlines() if line.strip()]
    if not name.endswith(".jsonl"):
        return [Prompt(line) for line in lines]
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{name}, line {number} is not JSON ({error}). Fix the line.") from error
        text = record if isinstance(record, str) else record.get("prompt") or record.get("text")
        if isinstance(text, str):
            found.append(Prompt(text))
        elif isinstance(record, dict) and record.get("messages"):
            found.append(_checked(record["messages"], f"{name}, line {number}"))
        else:
            raise DataError(f'{name}, line {number} has no "prompt", "text" or "messages". Add one of them.')
    return found


def _conversation(text: str) -> Prompt:
    """`--messages`: JSON, or the name of a file that holds it."""
    written = text if text.lstrip()[:1] in ("[", "{") else _read(text, "--messages")
    try:
        found = json.loads(written)
    except ValueError as error:
        raise DataError(f"--messages {text[:60]} is not JSON ({error}).") from error
    return _checked(found.get("messages") if isinstance(found, dict) else found, "--messages")


def _checked(messages: Any, where: str) -> Prompt:
    good = isinstance(messages, list) and messages
    if not good or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
        raise DataError(
            f'{where}: a conversation is a list of messages: [{{"role": "user", "content": "..."}}]. Found '
            f"{json.dumps(messages)[:60]}."
        )
    said = messages[-1]["content"]
    parts = said if isinstance(said, list) else [{"text": said}]
    return Prompt(" ".join(str(part["text"]) for part in parts if part.get("text")) or str(said), messages)
