"""Product and peer, each in its own process on the same files, one after the other, and a table of both.

A script defines `product(folder, ...)` and `peer(folder, ...)`, which return named numbers, and calls `compare`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# accelerate shards only under a launcher; these are the variables of one.
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}


def compare(
    parser: argparse.ArgumentParser,
    runs: Mapping[str, Callable[..., dict[str, float]]],
    write_data: Callable[..., None],
    columns: Mapping[str, tuple[str, str]],
) -> None:
    """Runs each of `runs` with the parsed arguments; `columns` are the table's numbers, with heading and format."""
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--one", choices=tuple(runs))
    parser.add_argument("--folder", type=Path)
    asked = vars(parser.parse_args())
    one, folder = asked.pop("one"), asked.pop("folder")
    if one:
        print("RESULT " + json.dumps(runs[one](folder, **asked)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        write_data(Path(temporary), 64 if asked["tiny"] else 600, tiny=asked["tiny"])
        rows = [_row(name, temporary, asked, columns) for name in runs]
    heads = ["job", *(head for head, _ in columns.values())]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads) + "\n" + "\n".join(rows))


def result(words: list[str], environ: Mapping[str, str]) -> dict[str, float] | None:
    """What a process printed after RESULT; None, and the end of its output, if it failed."""
    done = subprocess.run(words, capture_output=True, text=True, env=dict(environ))
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        print(done.stdout[-3000:], done.stderr[-3000:], flush=True)
        return None
    found: dict[str, float] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def _row(name: str, folder: str, asked: Mapping[str, Any], columns: Mapping[str, tuple[str, str]]) -> str:
    words = [sys.executable, sys.argv[0], "--one", name, "--folder", folder]
    words += [f"--{key}" for key, value in asked.items() if value is True]
    words += [f"--{key}={value}" for key, value in asked.items() if not isinstance(value, bool)]
    environ = os.environ | (LAUNCHED if name == "peer" and not asked["tiny"] else {})
    found = result(words, environ)
    if found is None:
        return f"| {name} | failed |" + " |" * (len(columns) - 1)
    return f"| {name} | " + " | ".join(format(found[key], shape) for key, (_, shape) in columns.items()) + " |"
