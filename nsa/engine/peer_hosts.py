"""Peer hosts of a multi-node run: the network interface to them, and how a lost one is detected.

A process that dies closes its connections. A host that loses network or power does not, so
collectives wait for their long time-outs. TCP keep-alive on separate connections detects it within
UNREACHABLE_SECONDS even while all ranks are busy, as the kernels exchange the probes.

    first rank of host 1  ----+
    first rank of host 2  ----+----  rank 0      a rank that loses its connection exits, which
    first rank of host 3  ----+                  closes those to the other hosts
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil

from nsa.engine.cpu_collectives import CpuCollectives
from nsa.monitor.observer import warn

UNREACHABLE_SECONDS = 60  # a host that does not answer for this long is lost
CONNECT_TIMEOUT = 30.0  # seconds
READ_TIMEOUT = 5.0  # until an accepted connection has sent its token
ACCEPTED = b"+"
NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class RankProcess(NamedTuple):
    """Host and process of a rank."""

    host: str
    pid: int


def interface_towards(address: str) -> str | None:
    """Return the network interface used to reach `address`; None for the loopback."""
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            source = probe.getsockname()[0]
    except OSError:
        return None
    if source == "::1" or source.startswith("127."):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == source for entry in addresses):
            return name
    return None


def connect_hosts(
    collectives: CpuCollectives, rank: int, hosts: Sequence[str]
) -> dict[str, socket.socket]:
    """Connect rank 0 with the first rank of each other host; return connections by host name.

    A collective; `hosts[i]` is rank i's. Other ranks get no connection.
    """
    first_ranks = {host: hosts.index(host) for host in hosts}
    if len(first_ranks) == 1:
        return {}
    listener, port, token = None, 0, secrets.token_hex(8)
    if rank == 0:
        family = socket.getaddrinfo(os.environ["MASTER_ADDR"], None)[0][0]
        listener = socket.create_server(("", 0), family=family, backlog=1_024)
        port = listener.getsockname()[1]
    port, token = collectives.broadcast((port, token), tuple[int, str])
    connections: dict[str, socket.socket] = {}
    if listener is not None:
        expected = {number: host for host, number in first_ranks.items() if host != hosts[0]}
        connections = _accept(listener, token, expected)
    elif first_ranks[hosts[rank]] == rank:
        try:
            address = (os.environ["MASTER_ADDR"], port)
            connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT)
            connection.sendall(f"{token} {rank}".encode())
            if connection.recv(1) != ACCEPTED:
                raise OSError("it refused the connection")
            connections[hosts[0]] = connection
        except OSError as error:
            _warn_not_connected(hosts[0], str(error))
    for connection in connections.values():
        _enable_keep_alive(connection)
    return connections


def find_lost_host(connections: Mapping[str, socket.socket]) -> str | None:
    """Return a message about the first lost host, or None; does not wait."""
    for host, connection in connections.items():
        try:
            if connection.recv(1) == b"":
                return f"host {host} closed its connection"
        except BlockingIOError:
            continue
        except OSError as error:
            if error.errno in NO_ANSWER:
                return f"host {host} has not answered for {UNREACHABLE_SECONDS} s"
            return f"host {host} is lost ({error.strerror})"
    return None


def _accept(
    listener: socket.socket, token: str, expected: dict[int, str]
) -> dict[str, socket.socket]:
    """Accept one connection from each of the `expected` ranks; drop those without the token."""
    connections, deadline = {}, time.monotonic() + CONNECT_TIMEOUT
    with listener:
        while expected and (seconds_left := deadline - time.monotonic()) > 0:
            listener.settimeout(seconds_left)
            with contextlib.suppress(OSError, ValueError):
                connection, _ = listener.accept()
                connection.settimeout(READ_TIMEOUT)
                received, _, rank = connection.recv(64).decode().partition(" ")
                if received == token and int(rank) in expected:
                    connection.sendall(ACCEPTED)  # the rank waits for it
                    connections[expected.pop(int(rank))] = connection
                else:
                    connection.close()
    for host in expected.values():
        _warn_not_connected(host, "it did not connect")
    return connections


def _enable_keep_alive(connection: socket.socket) -> None:
    interval = max(1, UNREACHABLE_SECONDS // 6)
    probes = UNREACHABLE_SECONDS // interval - 1
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)


def _warn_not_connected(host: str, reason: str) -> None:
    loss = "its loss is noticed only by a collective's time-out"
    warn(f"no connection to host {host} ({reason}): {loss}")
