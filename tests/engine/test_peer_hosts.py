"""How a machine shows that it is gone, and by which network machines talk."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from nsa.engine import peer_hosts
from nsa.engine.peer_hosts import find_lost_host, interface_towards


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    one.setblocking(False)
    with one, other:
        yield one, other


def test_a_machine_is_gone_once_its_connection_closes_and_not_while_it_is_silent(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, other = ends
    assert find_lost_host({}) is None
    assert find_lost_host({"far": one}) is None
    other.close()
    assert find_lost_host({"far": one}) == "host far closed its connection"


def test_the_kernel_asks_often_enough_to_know_within_the_limit(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = ends
    for limit in (60, 3):
        monkeypatch.setattr(peer_hosts, "UNREACHABLE_SECONDS", limit)
        peer_hosts._enable_keep_alive(one)
        idle, every, times = (
            one.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert idle + every * times == limit


def test_a_stranger_that_calls_is_not_taken_for_a_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
        found: dict[str, socket.socket] = {}
        accept = threading.Thread(
            target=lambda: found.update(peer_hosts._accept(server, "secret", {2: "far"}))
        )
        accept.start()
        callers = []
        for said in (b"", b"GET / HTTP/1.1\r\n", b"guess 2", b"secret 7", b"secret 2"):
            caller = socket.create_connection(where)
            callers.append(caller)
            if said:
                caller.sendall(said)
            else:
                caller.close()
        accept.join(30)
        assert list(found) == ["far"]
        assert found["far"].getpeername() == callers[-1].getsockname()
        for connection in (*callers, *found.values()):
            connection.close()


def test_ranks_of_one_machine_are_left_to_the_loopback() -> None:
    for address in ("127.0.0.1", "localhost", "nowhere.invalid"):
        assert interface_towards(address) is None


def test_the_interface_that_has_the_address_is_found() -> None:
    import psutil

    own = [
        (name, known.address)
        for name, addresses in psutil.net_if_addrs().items()
        for known in addresses
        if known.family == socket.AF_INET and not known.address.startswith("127.")
    ]
    if not own:
        pytest.skip("this machine has no network interface but the loopback")
    name, address = own[0]
    assert interface_towards(address) == name
