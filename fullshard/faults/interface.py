"""Why gloo is told which network interface to use: the name of the host leads elsewhere.

Must not choose the interface.
"""

from __future__ import annotations

import ipaddress
import socket
import sys


def explain_interface(name: str, addresses: set[str], *, say: bool) -> None:
    """Prints the reason, if there is one and `say`. Addresses of the hardware are left out."""
    if say and (line := note(name, set(filter(_is_address, addresses)))):
        sys.stderr.write(f"{line}\n")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def note(name: str, addresses: set[str], *, host: str | None = None) -> str | None:
    """A line for the console if the host's name is not one of the `addresses` of the interface `name`; None if the
    interface is the loopback, which connects ranks of one machine."""
    if all(ipaddress.ip_address(each).is_loopback for each in addresses):
        return None
    host = host or socket.gethostname()
    try:
        found = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        found = set()
    if found & addresses:
        return None
    leads = f"resolves to {', '.join(sorted(found))}" if found else "does not resolve"
    return (
        f"gloo uses the interface {name}, which leads to the other nodes: the name of this host, {host}, {leads}. To "
        "choose another, set GLOO_SOCKET_IFNAME; NCCL chooses by itself, unless NCCL_SOCKET_IFNAME is set."
    )
