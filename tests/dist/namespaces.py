"""Two nodes on one machine: two network namespaces with a cable between them, each with its own hosts file.

The host's own name resolves to 127.0.1.1, as on many systems, and the name `zero` is the first node's: on itself the
loopback, too. Only addresses inside the namespaces are used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ADDRESSES = ("10.77.0.1", "10.77.0.2")
HOSTS = ("first", "second")


class NotPermitted(Exception):
    """This process may not make namespaces."""


class Nodes:
    """The two nodes."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.names = folder, names

    def start(self, node: int, command: Sequence[str], **settings: Any) -> subprocess.Popen[str]:
        """A process on a node. `env` adds variables."""
        environ = {**_environ(), **settings.pop("env", {})}
        hosts = self.folder / f"hosts-{node}"
        zero = "127.0.1.1" if node == 0 else ADDRESSES[0]
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {HOSTS[node]}\n{zero} zero\n")
        mount = f'hostname {HOSTS[node]} && mount --bind "{hosts}" /etc/hosts && exec "$@"'
        inside = ["ip", "netns", "exec", self.names[node], "unshare", "--mount", "--uts", "sh", "-c", mount, "sh"]
        return subprocess.Popen(
            [*inside, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, **settings
        )

    def cut(self) -> None:
        """Pulls the cable."""
        _ip("-n", self.names[0], "link", "set", "cable0", "down")

    def join(self) -> None:
        """Plugs it in again."""
        _ip("-n", self.names[0], "link", "set", "cable0", "up")


@contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    """Raises NotPermitted, with the reason, where namespaces cannot be made."""
    if os.geteuid() != 0:
        raise NotPermitted("only root may make network namespaces")
    assert shutil.which("ip", path=_environ()["PATH"]), "install iproute2: run `make namespaces`, as root or with sudo"
    names = [f"fullshard-{os.getpid()}-{node}" for node in (0, 1)]
    try:
        for name in names:
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, env=_environ())
            if made.returncode:
                raise NotPermitted(made.stderr.strip())
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1])
        for node, name in enumerate(names):
            _ip("-n", name, "address", "add", f"{ADDRESSES[node]}/24", "dev", f"cable{node}")
            _ip("-n", name, "link", "set", f"cable{node}", "up")
        yield Nodes(folder, names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, env=_environ())


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, env=_environ())


def _environ() -> dict[str, str]:
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    clean = {name: value for name, value in os.environ.items() if name not in left_out}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        clean.pop(name, None)
    return {**clean, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
