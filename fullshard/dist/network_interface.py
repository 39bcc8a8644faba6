"""Which network interface gloo uses: the one that reaches the other ranks.

By default gloo uses the address that the host's name resolves to. Many systems map that name to 127.0.1.1, and then
ranks on other nodes connect to themselves. GPU runs use gloo too. NCCL is left alone: it never takes the loopback, and
may use several interfaces at once. Must not import torch.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, MutableMapping

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def choose(master: str, others: Iterable[str | None], environ: MutableMapping[str, str] = os.environ) -> None:
    """Names the interface for gloo, unless the user has; `others` are the addresses of all ranks."""
    if environ.get(GLOO):
        return
    name = _named_for_nccl(environ.get(NCCL, "")) or _reaching(master, others)
    if name:
        environ[GLOO] = name


def address_towards(host: str) -> str | None:
    """The address of this machine from which `host` is reached; nothing is sent."""
    for family, _, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def _named_for_nccl(names: str) -> str | None:
    """The first interface that NCCL may use: `eth` means any of eth0, eth1, ..., `=eth0` only that one."""
    import psutil  # type: ignore[import-untyped]

    if not names or names.startswith("^"):
        return None
    first, present = names.lstrip("=").split(",")[0], sorted(psutil.net_if_addrs())
    exact = names.startswith("=")
    return next((name for name in present if name == first or (not exact and name.startswith(first))), None)


def _reaching(master: str, others: Iterable[str | None]) -> str | None:
    address = address_towards(master)
    if address is None or _is_loopback(address):
        # On its own node the master's name may be the loopback; then use the route to a rank on another node.
        far = next((other for other in others if other and not _is_loopback(other)), None)
        address = address_towards(far) if far else address
    return _interface_of(address) if address else None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _interface_of(address: str) -> str | None:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address.partition("%")[0] for each in addresses):
            return str(name)
    return None
