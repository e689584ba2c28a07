"""Two network namespaces joined by a rate-limited veth link.

The link exists only in the two namespaces: no interface, address or route of the machine changes,
and it disappears with them.
"""

import ctypes
import itertools
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

RANKS = 2  # one at each end
PREFIX = "nsa-link-"
INTERFACE = "nsalink"  # the name of both ends, each in its namespace
_numbers = itertools.count()
_FOLDER = Path("/run/netns")  # where `ip netns` keeps the names
_MTU = 65_535  # with the usual 1,500, packet headers would take 4% of the rate
_BURST = "128kb"  # bytes sent unthrottled; above the largest packet
_QUEUE = "16mb"  # bytes that wait at the throttle before packets are dropped


@dataclass(frozen=True)
class Link:
    namespaces: tuple[str, str]
    addresses: tuple[str, str] = ("10.77.0.1", "10.77.0.2")

    def enter(self, end: int) -> None:
        """Move this thread to one end; threads that it starts follow."""
        libc = ctypes.CDLL(None, use_errno=True)
        with (_FOLDER / self.namespaces[end]).open() as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {self.namespaces[end]}")

    def throttle(self, gbit: float | None) -> None:
        """Limit both ends to this many Gbit/s; None: as fast as the machine can."""
        for name in self.namespaces:
            tc = ["tc", "-n", name, "qdisc"]
            if gbit is None:
                subprocess.run([*tc, "del", "dev", INTERFACE, "root"], capture_output=True)
            else:
                bucket = ["rate", f"{gbit * 1e3:g}mbit", "burst", _BURST, "limit", _QUEUE]
                _run(*tc, "replace", "dev", INTERFACE, "root", "tbf", *bucket)


def link_obstacle() -> str | None:
    """Return why this machine or user cannot create a link; None if they can."""
    if platform.system() != "Linux":
        return f"network namespaces are Linux's, and this is {platform.system()}"
    if os.geteuid() != 0:
        return "only root may create network namespaces; run it as root"
    absent = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    return f"{' and '.join(absent)} not found; install iproute2" if absent else None


@contextmanager
def link() -> Iterator[Link]:
    """Create two joined namespaces and remove them on any exit, also by SIGTERM.

    The next link removes those that a killed process left.
    """
    if reason := link_obstacle():
        raise ValueError(f"a link needs root on Linux with ip and tc: {reason}")
    remove_leftovers()
    name = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
    created = Link((f"{name}-0", f"{name}-1"))
    handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        _create(created)
        yield created
    finally:
        for name in created.namespaces:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        signal.signal(signal.SIGTERM, handler)


def remove_leftovers() -> None:
    """Remove the namespaces of processes that have ended."""
    for path in sorted(_FOLDER.glob(f"{PREFIX}*")):
        if not Path("/proc", path.name.removeprefix(PREFIX).split("-")[0]).exists():
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True)


def _create(link: Link) -> None:
    first, second = link.namespaces
    for name in link.namespaces:
        _run("ip", "netns", "add", name)
    pair = ["type", "veth", "peer", "name", INTERFACE, "netns", second]
    _run("ip", "link", "add", "name", INTERFACE, "netns", first, *pair)
    for name, address in zip(link.namespaces, link.addresses, strict=True):
        for interface in ("all", "default", INTERFACE):  # IPv6 sends packets on an idle link
            key = f"net.ipv6.conf.{interface}.disable_ipv6=1"
            subprocess.run(["ip", "netns", "exec", name, "sysctl", "-q", key], capture_output=True)
        _run("ip", "-n", name, "addr", "add", f"{address}/30", "dev", INTERFACE)
        _run("ip", "-n", name, "link", "set", INTERFACE, "mtu", str(_MTU), "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(command)} failed: {' '.join(done.stderr.split())}")
