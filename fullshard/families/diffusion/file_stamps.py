"""A fingerprint of files by path, size and time: hashing them would take as long as encoding them.

Must not know records or what the files hold.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def stamped(paths: Iterable[str | None], begin: Path) -> str:
    """The fingerprint of files; relative paths start at `begin`. If the first is None, records contain their images,
    and no file is read."""
    found = hashlib.blake2b(digest_size=16)
    for index, path in enumerate(paths):
        if path is not None:
            found.update(_stamp(os.path.join(begin, path)))
        elif index == 0:
            return ""
    return found.hexdigest()


def _stamp(path: str) -> bytes:
    try:
        stat = os.stat(path)
        stamp = f"{stat.st_size} {stat.st_mtime_ns}"
    except (OSError, ValueError):  # no such file, or no path that could be one
        stamp = "missing"
    return f"{path} {stamp}\n".encode(errors="surrogatepass")
