"""System helpers: program output, paths, memory, network interface, processes, time limits."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import psutil  # imported where it is used, as is PyYAML: benchmarks run without both

T = TypeVar("T")
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # this machine's address for itself
_TIMEOUT_SECONDS = 10.0  # a stuck driver must not block the check


def output_of(*command: str) -> str:
    """Return a program's stdout, or "" if it is missing, fails or times out."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout if result.returncode == 0 else ""


def resource_path(name: str) -> Path:
    """Return the path of `recipes/…` or `ds_configs/…`.

    A wheel installs both in `share/nsa-m7c/`: beside the package with `pip install --target`, in a
    parent folder with --user or --prefix.
    """
    parents = Path(__file__).resolve().parents
    roots = (*parents, Path(sysconfig.get_path("data")))
    candidates = [parents[1] / name, *(root / "share" / "nsa-m7c" / name for root in roots)]
    return next((path for path in candidates if path.exists()), candidates[-1])


def user_path(text: str | Path) -> Path:
    """Return the path with a leading ~ as the home folder: no shell expands it in --to=~/x.

    An unknown user's ~name is kept; `Path.expanduser` would raise a RuntimeError.
    """
    return Path(os.path.expanduser(text))


def existing_or_resource(text: str) -> Path:
    """Return the path that a flag names; without a clone, `ds_configs/…` is the installed file."""
    path = user_path(text)
    is_ours = path.is_relative_to("recipes") or path.is_relative_to("ds_configs")
    if path.exists() or not is_ours:
        return path
    installed = resource_path(text)
    return installed if installed.exists() else path


def available_memory() -> int:
    """Return the available bytes of this machine, or its container's limit if that is lower."""
    import psutil

    from nsa.untrusted import text_or_empty

    available = psutil.virtual_memory().available
    limit = text_or_empty("/sys/fs/cgroup/memory.max").strip()  # "max": no limit
    return min(available, int(limit)) if limit.isdigit() else available


def isolated_environment() -> dict[str, str]:
    """Return the environment for a Python child that imports only what this process can import.

    Without PYTHONSAFEPATH (Python 3.11) it would import modules from the current directory.
    """
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def interface_towards(address: str) -> str | None:
    """Return the network interface used to reach `address`; None for the loopback."""
    import psutil

    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing, so any port will do
            source = probe.getsockname()[0]
    except OSError:
        return None
    if source == "::1" or source.startswith("127."):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == source for entry in addresses):
            return name
    return None


def package_version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def is_alive(process: psutil.Process) -> bool:
    """Return whether `process` runs; a zombie does not."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread, which can be abandoned: Python's exit does not wait for it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def with_timeout(seconds: float, work: Callable[[], T]) -> T:
    """Return the result of `work`; raise TimeoutError after `seconds`, whatever blocks it."""
    future = in_background(work)
    if not wait([future], seconds).done:
        raise TimeoutError(f"no response within {seconds:g} seconds")
    return future.result()
