"""The table of FSDP units: one line per unit, or per group of identical units; and their dtypes in one line.

Must not know how units are made.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fullshard.dist.shard import Unit
from fullshard.formatting.plural import counted
from fullshard.formatting.readable import short

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_HEADINGS = ("unit", "class", "parameters", "trained", "storage", "compute", "reduce", "tied")


def units_table(units: Sequence[Unit]) -> str:
    """Per unit its class, parameters, trained share, dtypes and tied group; identical units share a line."""
    ties = [group for unit in units for group in unit.tied]
    numbers = {tuple(group): str(index) for index, group in enumerate(ties, start=1)}
    rows = [_HEADINGS, *(_row(alike, numbers) for alike in _groups(units))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    right = (2, 3)
    lines = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    total, trained = sum(unit.parameters for unit in units), sum(unit.trainable for unit in units)
    noun = "unit" if len(units) == 1 else "units"
    summary = f"{len(units)} {noun}, {counted(total, 'parameter')}, {trained:,} trained ({_share(trained, total)})"
    notes = [f"tied {numbers[tuple(group)]}: {' = '.join(group)}" for group in ties]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], "", summary, *notes])


def dtype_line(units: Sequence[Unit]) -> str:
    """How the values of all units are stored and used."""
    stored, computed, reduced = (
        " and ".join(f"torch.{name}" for name in sorted(names))
        for names in ({d for u in units for d in u.storage}, {u.compute for u in units}, {u.reduce for u in units})
    )
    uniform = "all parameters" if " and " not in stored else "parameters"
    return f"{uniform} are stored in {stored}; compute {computed}, reduce {reduced}"


def _groups(units: Sequence[Unit]) -> list[list[Unit]]:
    """Groups units whose names differ only in their numbers, in the order of the first of each group."""
    groups: dict[tuple[object, ...], list[Unit]] = {}
    for unit in units:
        facts = (unit.class_name, unit.parameters, unit.trainable, tuple(unit.storage), unit.compute, unit.reduce)
        # A unit with tied parameters has its own line.
        own = unit.name if unit.tied else _NUMBER.sub("*", unit.name)
        groups.setdefault((own, *facts), []).append(unit)
    return list(groups.values())


def _row(alike: list[Unit], numbers: dict[tuple[str, ...], str]) -> tuple[str, ...]:
    unit = alike[0]
    return (
        _name(alike),
        unit.class_name,
        short(unit.parameters),
        _share(unit.trainable, unit.parameters),
        "+".join(map(_short, unit.storage)),
        _short(unit.compute),
        _short(unit.reduce),
        ", ".join(numbers[tuple(group)] for group in unit.tied) or "-",
    )


def _name(alike: list[Unit]) -> str:
    first = alike[0].name
    if len(alike) == 1:
        return first
    count = f" ({counted(len(alike), 'unit')})"
    found = [_NUMBER.findall(unit.name) for unit in alike]
    # One number that varies can be counted; if several vary, a star replaces each number.
    varying = [place for place, values in enumerate(zip(*found, strict=True)) if len(set(values)) > 1]
    if len(varying) != 1:
        return _NUMBER.sub("*", first) + count
    ranges = _ranges([int(numbers[varying[0]]) for numbers in found])
    places = iter(range(len(found[0])))
    return _NUMBER.sub(lambda match: ranges if next(places) == varying[0] else match.group(), first) + count


def _ranges(numbers: list[int]) -> str:
    """`0-2,4,6-7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return text if len(text) <= 24 else f"{text[:20].rpartition(',')[0]},..."


def _short(dtype: str) -> str:
    return dtype.replace("bfloat", "bf").replace("float", "fp")


def _share(trained: int, total: int) -> str:
    share = trained / max(total, 1)
    return "100%" if trained == total else "0%" if not trained else f"{share:.2%}"
