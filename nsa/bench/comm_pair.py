"""Two rank processes that take steps together on request, for `python -m nsa.bench comm`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from nsa.bench.netns import INTERFACE, Link

RANKS = 2
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # gloo warns about addresses without host names


class RankPair:
    """Two processes of nsa.bench.comm_ranks; requests and replies are lines of JSON."""

    def __init__(self, backend: str, link: Link | None, env: Mapping[str, str]) -> None:
        group = {
            "backend": backend,
            "interface": INTERFACE if link else "",
            "address": link.addresses[0] if link else "127.0.0.1",
            "port": 29_500 if link else _free_port(),
            "threads": max(1, (os.cpu_count() or 1) // RANKS),
        }
        self._ranks: list[subprocess.Popen[str]] = []
        self._replies: list[TextIO] = []
        for rank in range(RANKS):
            read, write = os.pipe()  # not stdout: libraries print there
            options = json.dumps({"rank": rank, "replies": write, **group})
            command = [sys.executable, "-m", "nsa.bench.comm_ranks", options]
            self._ranks.append(
                subprocess.Popen(
                    [*(link.inside(rank) if link else []), *command],
                    env={**os.environ, **QUIET, **env},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[write],
                    start_new_session=True,
                    text=True,
                )
            )
            os.close(write)
            self._replies.append(os.fdopen(read))

    def request(self, action: str, **options: Any) -> dict[str, Any]:
        """Have both ranks carry out an action; return rank 0's reply."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps({"action": action, **options}) + "\n")
            rank.stdin.flush()
        lines = [replies.readline() for replies in self._replies]
        if not all(lines):
            raise RuntimeError(f"a rank ended during {action!r}; its output is above")
        return json.loads(lines[0])

    def close(self) -> None:
        """End the ranks: they exit when stdin closes, or are killed."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(10)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()


@contextmanager
def rank_pair(
    backend: str, link: Link | None = None, env: Mapping[str, str] | None = None
) -> Iterator[RankPair]:
    """Start two ranks, joined by `link` if given, and end them."""
    pair = RankPair(backend, link, env or {})
    try:
        yield pair
    finally:
        pair.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
