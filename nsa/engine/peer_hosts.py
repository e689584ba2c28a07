"""The machines of a run: by which network they talk, and how it shows that one is gone.

A process that dies closes its connections. A machine that loses its network or its power closes
nothing: collectives then wait as long as their time-outs, which are long because a step may be.
TCP's keep-alive on a connection of its own tells the two apart within a minute, whatever the ranks
are doing, because the machines' kernels ask and answer.

    first rank of machine 1  ----+
    first rank of machine 2  ----+----  rank 0        a machine that hears that one is gone ends,
    first rank of machine 3  ----+                    and so the others hear of it
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence

import psutil

from nsa.engine.consensus import Consensus

UNREACHABLE_SECONDS = 60  # without an answer, after which a machine is gone
CONNECT_SECONDS = 30.0
_NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


def interface_towards(address: str) -> str | None:
    """The network interface by which `address` is reached, or whose own it is; None: loopback."""
    try:
        family, _, _, _, where = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    if own == "::1" or own.startswith("127."):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == own for known in addresses):
            return name
    return None


def connect_hosts(
    agreement: Consensus, rank: int, hosts: Sequence[str]
) -> dict[str, socket.socket]:
    """Connections to the other machines by their names, to be asked `why_gone`; for all ranks.

    `hosts` of the ranks, in their order.
    Rank 0 has one to each, the first rank of each other machine one to rank 0's, the rest none.
    """
    here = hosts[rank]
    first_ranks: dict[str, int] = {}
    for number, host in enumerate(hosts):
        first_ranks.setdefault(host, number)
    if len(first_ranks) == 1:
        return {}
    listener, address = None, None
    if rank == 0:
        listener = _listen()
        address = (listener.getsockname()[1], secrets.token_hex(8))
    port, token = agreement.from_rank_0(address) or (0, "")
    if listener is not None:
        missing = {number: host for host, number in first_ranks.items() if host != here}
        found = _accept(listener, token, missing)
    elif first_ranks[here] == rank:
        found = _connect(port, token, rank, next(iter(first_ranks)))
    else:
        found = {}
    for connection in found.values():
        _keep_alive(connection)
    return found


def why_gone(connections: Mapping[str, socket.socket]) -> str | None:
    """What became of the first machine that is gone; None while all are there. It never waits."""
    for host, connection in connections.items():
        try:
            if connection.recv(1) == b"":
                return f"machine {host} has ended its part of the run"
        except BlockingIOError:
            continue
        except OSError as error:
            if error.errno in _NO_ANSWER:
                return f"machine {host} has not answered for {UNREACHABLE_SECONDS} s"
            return f"machine {host} is gone ({error.strerror})"
    return None


def _listen() -> socket.socket:
    family = socket.getaddrinfo(os.environ["MASTER_ADDR"], None)[0][0]
    return socket.create_server(("", 0), family=family, backlog=1_024)


def _accept(
    listener: socket.socket, token: str, missing: dict[int, str]
) -> dict[str, socket.socket]:
    """A connection of each of the `missing` ranks; who does not know the token is sent away."""
    found, deadline = {}, time.monotonic() + CONNECT_SECONDS
    with listener:
        while missing and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            with contextlib.suppress(OSError, ValueError):
                connection, _ = listener.accept()
                connection.settimeout(1.0)
                said, _, rank = connection.recv(64).decode().partition(" ")
                if said == token and int(rank) in missing:
                    found[missing.pop(int(rank))] = connection
                else:
                    connection.close()
    for host in missing.values():
        _warn(host, "it did not connect")
    return found


def _connect(port: int, token: str, rank: int, host: str) -> dict[str, socket.socket]:
    try:
        where = (os.environ["MASTER_ADDR"], port)
        connection = socket.create_connection(where, timeout=CONNECT_SECONDS)
        connection.sendall(f"{token} {rank}".encode())
    except OSError as error:
        _warn(host, str(error))
        return {}
    return {host: connection}


def _keep_alive(connection: socket.socket) -> None:
    """Have the kernel ask over and over whether the other machine is there."""
    every = max(1, UNREACHABLE_SECONDS // 6)
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, UNREACHABLE_SECONDS // every - 1)


def _warn(host: str, why: str) -> None:
    print(
        f"nsa: no connection to machine {host} ({why}): where it is lost, this run ends only when "
        "a collective's time-out does",
        file=sys.stderr,
        flush=True,
    )
