"""A Ray of one machine for tests: started as a process, which prints its addresses and ends with its standard input.

Run as a script. Everything that it starts ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Cluster:
    gcs: str
    """What ray.init takes."""
    dashboard: str
    """What `ray job` takes."""
    token: str
    """Made for this Ray alone: by default Ray asks for one, and would write it to the home folder."""

    @property
    def environ(self) -> dict[str, str]:
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return os.environ | _with(self.token) | {"RAY_ADDRESS": self.gcs, "PATH": tools}


def _with(token: str) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def started(cpus: int = 4) -> Iterator[Cluster]:
    """Ray with a dashboard, which jobs need; its log lines are kept off the console."""
    token = uuid.uuid4().hex
    environ = _with(token) | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
    }
    words = [sys.executable, __file__, str(cpus)]
    process = subprocess.Popen(
        words, env=os.environ | environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin
    assert process.stdout
    try:
        found = next((line for line in process.stdout if line.startswith("{")), None)
        assert found, "Ray did not start"
        yield Cluster(**json.loads(found), token=token)
    finally:
        process.stdin.close()
        process.wait(300)
        process.stdout.close()


if __name__ == "__main__":
    import ray

    context = ray.init(
        num_cpus=int(sys.argv[1]),
        object_store_memory=100 * 2**20,
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        log_to_driver=False,
        logging_level="error",
    )
    print(
        json.dumps({"gcs": context.address_info["gcs_address"], "dashboard": f"http://{context.dashboard_url}"}),
        flush=True,
    )
    sys.stdin.read()
    ray.shutdown()
