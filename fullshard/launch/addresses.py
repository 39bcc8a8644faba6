"""Addresses of this machine and of others: HOST:PORT, free ports, and the network interface that reaches the others.

By default gloo uses the address that the host's name resolves to. Many systems map that name to 127.0.1.1, and then
ranks on other nodes connect to themselves. GPU runs use gloo too. NCCL is left alone: it never takes the loopback, and
may use several interfaces at once. Must not import torch.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, MutableMapping

from fullshard.errors import SetupError
from fullshard.faults.interface import explain_interface

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def split_address(master: str) -> tuple[str, int]:
    """HOST:PORT in its two parts."""
    host, _, port = master.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise SetupError(
            f"--master {master} is not HOST:PORT. Write the address of node 0 and a free port: 10.0.0.1:29500."
        )
    return host.strip("[]"), int(port)


def resolve_host(host: str, where: str) -> None:
    """Raises SetupError if this machine cannot resolve the host."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        raise SetupError(
            f"{where}: this machine cannot find the host {host!r}. Use the IP address of node 0, or a name that "
            "resolves here."
        ) from None


def probe_port(port: int, where: str) -> None:
    """Raises SetupError if the port is in use on this machine."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise SetupError(
                f"{where}: port {port} cannot be used on this machine ({error.strerror}); another run may have it. "
                f"Choose another port, the same on every node."
            ) from None


def is_local(host: str) -> bool:
    """Whether an address belongs to this machine: only then can a socket be bound to it."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
                return True
            except OSError:
                continue
    return False


def address_towards(host: str) -> str | None:
    """The address of this machine on the route to `host`; nothing is sent."""
    for family, _, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)
                return str(probe.getsockname()[0])
            except OSError:
                continue
    return None


def choose_interface(
    master: str, others: Iterable[str | None], environ: MutableMapping[str, str] = os.environ, *, say: bool = False
) -> None:
    """Names the interface for gloo, unless the user has; `others` are the addresses of all ranks."""
    import psutil  # type: ignore[import-untyped]

    if environ.get(GLOO):
        return
    interfaces = psutil.net_if_addrs()
    name = _named_for_nccl(environ.get(NCCL, ""), sorted(interfaces))
    if name is None and (address := _own_address(master, others)):
        mine = _bare(address)
        name = next((n for n, known in interfaces.items() if mine in {_bare(each.address) for each in known}), None)
    if name:
        environ[GLOO] = name
        explain_interface(name, {_bare(each.address) for each in interfaces[name]}, say=say)


def _named_for_nccl(names: str, present: list[str]) -> str | None:
    """The first interface that NCCL may use: `eth` means any of eth0, eth1, ..., `=eth0` only that one."""
    if not names or names.startswith("^"):
        return None
    first, exact = names.lstrip("=").split(",")[0], names.startswith("=")
    return next((name for name in present if name == first or (not exact and name.startswith(first))), None)


def _own_address(master: str, others: Iterable[str | None]) -> str | None:
    address = address_towards(master)
    if address is None or _is_loopback(address):
        # On its own node the master's name may resolve to the loopback; then use the route to a rank on another node.
        far = next((other for other in others if other and not _is_loopback(other)), None)
        address = address_towards(far) if far else address
    return address


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(_bare(address)).is_loopback


def _bare(address: str) -> str:
    """Without the zone of an IPv6 address: `fe80::1%eth0`."""
    return address.partition("%")[0]
