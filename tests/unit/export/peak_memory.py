"""Exports checkpoints and prints how far memory rose above what the process had before: a process of its own."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

from fullshard.export import write
from fullshard.export.source import open_trained

STATUS = Path("/proc/self/status")


def resident(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    found = re.search(rf"^{key}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def rise(checkpoint: str, out: str, form: str, shard_bytes: str, dtype: str) -> int:
    trained = open_trained(Path(checkpoint), base=None, trust_remote_code=False)
    names = list(write.names_for(trained, form))
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.0005):
            # Memory of its own: the mapped pages of a file that is read belong to the system.
            peak = max(peak, resident("RssAnon"))

    before, watcher = resident("RssAnon"), threading.Thread(target=watch)
    watcher.start()
    write.write(trained, Path(out), write.ExportOptions(form, dtype, int(shard_bytes)), trained.tensors(names))
    done.set()
    watcher.join()
    return peak - before


if __name__ == "__main__":
    for start in range(1, len(sys.argv), 5):
        print(rise(*sys.argv[start : start + 5]))
