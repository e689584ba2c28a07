"""Peer hosts: detecting a lost one, and the network interface to use."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import psutil
import pytest

from nsa.engine import peer_hosts
from nsa.engine.peer_hosts import find_lost_host, interface_towards


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    one.setblocking(False)
    with one, other:
        yield one, other


def test_a_host_is_lost_when_its_connection_closes_but_not_while_it_is_silent(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, other = ends
    assert find_lost_host({}) is None
    assert find_lost_host({"far": one}) is None
    other.close()
    assert find_lost_host({"far": one}) == "host far closed its connection"


@pytest.mark.parametrize("limit", [60, 3])
def test_keep_alive_probes_detect_a_silent_host_within_the_limit(
    limit: int, ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = ends
    monkeypatch.setattr(peer_hosts, "UNREACHABLE_SECONDS", limit)
    peer_hosts._enable_keep_alive(one)
    idle, interval, probes = (
        one.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert idle + interval * probes == limit


def test_a_connection_without_the_token_is_not_accepted_as_a_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        accepted: dict[str, socket.socket] = {}
        accept = threading.Thread(
            target=lambda: accepted.update(peer_hosts._accept(server, "secret", {2: "far"}))
        )
        accept.start()
        callers = []
        for message in (b"", b"GET / HTTP/1.1\r\n", b"guess 2", b"secret 7", b"secret 2"):
            caller = socket.create_connection(address)
            callers.append(caller)
            if message:
                caller.sendall(message)
            else:
                caller.close()
        accept.join(30)
        assert list(accepted) == ["far"]
        assert accepted["far"].getpeername() == callers[-1].getsockname()
        for connection in (*callers, *accepted.values()):
            connection.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "nowhere.invalid"])
def test_ranks_on_one_host_use_the_loopback(address: str) -> None:
    assert interface_towards(address) is None


def test_the_interface_with_the_address_is_found() -> None:
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                assert interface_towards(entry.address) == name
                return
    pytest.skip("this machine has no network interface but the loopback")
