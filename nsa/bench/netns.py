"""Two network namespaces joined by a link of their own, whose speed is chosen.

The link lives in the two namespaces alone: no interface, address or route of the machine is
touched, and with the namespaces it goes.
"""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

PREFIX = "nsa-link-"
INTERFACE = "nsalink"  # the name of either end, each in a namespace of its own
_numbers = itertools.count()
_FOLDER = Path("/run/netns")  # where `ip netns` keeps their names
_MTU = 65_535  # the packet headers of a small one would take 4% of the rate
_BURST = "128kb"  # that may pass at once: above the largest packet
_QUEUE = "16mb"  # that waits for its turn before anything is dropped


class LinkError(ValueError):
    """This machine, or this user, cannot make a link; the message says what is missing."""


@dataclass(frozen=True)
class Link:
    """What joins the two namespaces, and how to work in them."""

    namespaces: tuple[str, str]
    addresses: tuple[str, str] = ("10.77.0.1", "10.77.0.2")

    def inside(self, end: int) -> list[str]:
        """The words before a command that shall run at this end."""
        return ["ip", "netns", "exec", self.namespaces[end]]

    def throttle(self, gbit: float | None) -> None:
        """Let either end send that many Gbit/s from now on; None: as fast as the machine can."""
        for name in self.namespaces:
            tc = ["tc", "-n", name, "qdisc"]
            if gbit is None:
                subprocess.run([*tc, "del", "dev", INTERFACE, "root"], capture_output=True)
            else:
                bucket = ["rate", f"{gbit * 1e3:g}mbit", "burst", _BURST, "limit", _QUEUE]
                _run(*tc, "replace", "dev", INTERFACE, "root", "tbf", *bucket)


def missing() -> str | None:
    """Why this machine or user cannot make a link; None where nothing is known against it."""
    if platform.system() != "Linux":
        return f"network namespaces are Linux's, and this is {platform.system()}"
    if os.geteuid() != 0:
        return "only root may make network namespaces; run it as root"
    absent = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if absent:
        return f"{' and '.join(absent)} not found; install iproute2"
    return None


@contextmanager
def link() -> Iterator[Link]:
    """Make two joined namespaces and remove them however this ends, by SIGTERM too.

    After SIGKILL nothing can be removed: the next link does that. LinkError where a machine
    allows no namespaces.
    """
    reason = missing()
    if reason:
        raise LinkError(reason)
    remove_leftovers()
    name = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
    made = Link((f"{name}-0", f"{name}-1"))
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        _join(made)
        yield made
    finally:
        for name in made.namespaces:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        signal.signal(signal.SIGTERM, before)


def remove_leftovers() -> list[str]:
    """Remove the namespaces of processes that are gone; returns their names."""
    names = sorted(path.name for path in _FOLDER.glob(f"{PREFIX}*"))
    gone = [
        name
        for name in names
        if not Path("/proc", name.removeprefix(PREFIX).split("-")[0]).exists()
    ]
    for name in gone:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return gone


def _join(made: Link) -> None:
    first, second = made.namespaces
    for name in made.namespaces:
        _run("ip", "netns", "add", name)
    pair = ["type", "veth", "peer", "name", INTERFACE, "netns", second]
    _run("ip", "link", "add", "name", INTERFACE, "netns", first, *pair)
    for name, address in zip(made.namespaces, made.addresses, strict=True):
        for interface in ("all", "default", INTERFACE):  # IPv6 talks to itself on an idle link
            key = f"net.ipv6.conf.{interface}.disable_ipv6=1"
            subprocess.run(["ip", "netns", "exec", name, "sysctl", "-q", key], capture_output=True)
        _run("ip", "-n", name, "addr", "add", f"{address}/30", "dev", INTERFACE)
        _run("ip", "-n", name, "link", "set", INTERFACE, "mtu", str(_MTU), "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LinkError(f"{' '.join(command)} failed: {' '.join(done.stderr.split())}")


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
