"""Links between network namespaces: seen inside alone, removed with their process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.netns import PREFIX, link_obstacle, remove_leftovers
from tests.ranks import ROOT

needs_link = pytest.mark.skipif(bool(link_obstacle()), reason=f"needs a link: {link_obstacle()}")
HOLD = "import sys, time\nfrom tests.netns import link\nwith link():\n"
HOLD += "    print('up', flush=True)\n    time.sleep(60)\n"


def namespaces() -> set[str]:
    """All namespaces of links."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines() if line.startswith(PREFIX)}


def namespaces_of(process: subprocess.Popen[str]) -> set[str]:
    return {name for name in namespaces() if name.startswith(f"{PREFIX}{process.pid}-")}


def link_holder() -> subprocess.Popen[str]:
    """A process with a link."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@needs_link
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_link_is_removed_with_its_process(end: signal.Signals) -> None:
    process = link_holder()
    assert len(namespaces_of(process)) == 2
    process.send_signal(end)
    process.wait(30)
    assert not namespaces_of(process)


@needs_link
def test_the_next_link_removes_the_leftovers_of_a_killed_process_only() -> None:
    killed, living = link_holder(), link_holder()
    try:
        killed.kill()
        killed.wait(30)
        left = namespaces_of(killed)
        assert len(left) == 2
        assert left <= set(remove_leftovers())
        assert not namespaces_of(killed)
        assert len(namespaces_of(living)) == 2
    finally:
        living.terminate()
        living.wait(30)
