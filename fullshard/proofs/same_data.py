"""The files of a source, so that an error can say which of them changed.

Must not know checkpoints, tokens or ranks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fullshard.contracts.data import Records
from fullshard.formatting.plural import counted
from fullshard.formatting.readable import size

LIMIT = 2000
"""Data sets with more files than this are not listed."""
_SHOWN = 3

Inventory = dict[str, dict[str, Any]]
"""Records, bytes and a fingerprint of the content of each part, by its name."""


def inventory(records: Records) -> Inventory:
    """The parts of open records, such as files; empty if there are more than LIMIT."""
    parts = _parts(records)
    if len(parts) > LIMIT:
        return {}
    found: Inventory = {}
    for part in parts:
        name = re.sub(r"(:\d+|, record \d+)$", "", part.where(0)) if len(part) else f"part {len(found) + 1}"
        while name in found:
            name += "'"
        path = Path(name)
        found[name] = {
            "records": len(part),
            "size_bytes": path.stat().st_size if path.is_file() else None,
            "content": part.fingerprint(),
        }
    return found


def _parts(records: Records) -> list[Records]:
    inner = getattr(records, "parts", None)
    return [part for each in inner for part in _parts(each)] if inner else [records]


def changes(before: Inventory, now: Inventory) -> list[str]:
    """What was added, removed and changed between two inventories. A renamed file counts as unchanged."""
    then, today = ({entry["content"] for entry in each.values()} for each in (before, now))
    added = [name for name, entry in now.items() if name not in before and entry["content"] not in then]
    removed = [name for name, entry in before.items() if name not in now and entry["content"] not in today]
    other = [name for name in now if name in before and now[name]["content"] != before[name]["content"]]
    found = {
        "added": {name: _amount(now[name]) for name in added},
        "removed": {name: _amount(before[name]) for name in removed},
        "changed": {name: f"{_amount(before[name])} then, {_amount(now[name])} now" for name in other},
    }
    return [f"{what} {_some(amounts)}" for what, amounts in found.items() if amounts]


def _amount(entry: dict[str, Any]) -> str:
    records = counted(int(entry.get("records", 0)), "record")
    held = entry.get("size_bytes")
    return records if held is None else f"{records} in {size(held) if held >= 2**20 else f'{held:,} bytes'}"


def _some(amounts: dict[str, str]) -> str:
    shown = ", ".join(f"{name} ({amount})" for name, amount in list(amounts.items())[:_SHOWN])
    return shown + (f" and {len(amounts) - _SHOWN:,} more" if len(amounts) > _SHOWN else "")
