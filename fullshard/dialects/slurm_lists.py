"""SLURM's way to write lists of hosts and of tasks, as in the variables of a job. Must not know ranks."""

from __future__ import annotations

import re


def expand_hosts(nodelist: str) -> list[str]:
    """The hosts of a SLURM node list: `node[01-03,07],login1`."""
    hosts: list[str] = []
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        names = [""]
        for text, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", entry):
            ends = [text] if text else [number for part in ranges.split(",") for number in _numbers(part)]
            names = [name + end for name in names for end in ends]
        hosts.extend(names)
    return hosts


def _numbers(part: str) -> list[str]:
    first, _, last = part.partition("-")
    return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)] if last else [first]


def tasks_per_node(text: str) -> list[int]:
    """SLURM's `8(x2),4` as 8, 8, 4."""
    return [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
