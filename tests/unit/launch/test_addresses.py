"""Which interface gloo gets, and what is said about it."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from fullshard.faults.interface import note
from fullshard.launch import addresses


def test_a_name_that_leads_elsewhere_is_explained() -> None:
    said = note("eth1", {"10.0.0.7"}, host="localhost")
    assert said is not None
    assert (
        "gloo uses the interface eth1, which leads to the other nodes: the name of this host, localhost, resolves"
        in said
    )
    assert "127.0.0.1" in said
    assert "set GLOO_SOCKET_IFNAME" in said
    assert "does not resolve" in str(note("eth1", {"10.0.0.7"}, host="no-such-host.invalid"))


def test_what_gloo_would_choose_itself_is_not_explained() -> None:
    assert note("lo", {"127.0.0.1", "::1"}, host="no-such-host.invalid") is None, "one machine"
    assert note("eth1", {"10.0.0.7", "127.0.0.1"}, host="localhost") is None


def test_the_users_variables_win() -> None:
    environ = {addresses.GLOO: "eth7"}
    addresses.choose_interface("127.0.0.1", [], environ)
    assert environ == {addresses.GLOO: "eth7"}
    present = sorted(psutil.net_if_addrs())[0]
    environ = {addresses.NCCL: f"={present}"}
    addresses.choose_interface("127.0.0.1", [], environ)
    assert environ[addresses.GLOO] == present


def test_the_interface_on_the_route_is_chosen(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The master's name leads to the loopback, as on node 0 itself: then the route to another rank counts."""
    towards = {"master": "127.0.1.1", "10.0.0.9": "10.0.0.7"}
    known = {
        name: [SimpleNamespace(family=socket.AF_INET, address=address)]
        for name, address in (("lo", "127.0.0.1"), ("eth1", "10.0.0.7"))
    }
    known["eth1"].append(SimpleNamespace(family=psutil.AF_LINK, address="02:42:ac:11:00:02"))
    monkeypatch.setattr(addresses, "address_towards", towards.get)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    environ: dict[str, str] = {}
    addresses.choose_interface("master", ["127.0.1.1", None, "10.0.0.9"], environ, say=True)
    assert environ == {addresses.GLOO: "eth1"}
    assert "gloo uses the interface eth1" in capsys.readouterr().err
