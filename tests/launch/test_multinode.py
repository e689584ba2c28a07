"""`launch/multinode.sh`: two nodes train as one, and neither waits for the other once it is lost.

A node is a network namespace with its own address, name and processes.
"""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import netns
from tests.engine.runs import LIMIT, TINY, losses, read_metrics
from tests.launch.clone import run, write_script
from tests.ranks import ROOT, WITHOUT_COMPILER, spawn_ranks, user_environment

SECONDS = 90.0  # far below any time-out of a collective
SETTINGS = [*TINY, "--set=train.eval_every=0", "--set=checkpoint.every=0", "--steps=10000"]
LIMITS = ["--set=monitor.watch.compute=6"]
NODE = "unshare --uts --pid --fork --mount-proc --kill-child bash -c"
RECIPE = f"""\
import runpy, sys
from nsa.engine import process_group, shutdown
shutdown.PEER_LOSS_GRACE_SECONDS = process_group.ROOT_CAUSE_GRACE_SECONDS = 1
sys.path.insert(0, "{ROOT}/recipes")
runpy.run_path("{ROOT}/recipes/m7c.py", run_name="__main__")
"""
# Moves a forked rank to its node.
MOVE = """\
import ctypes, os, socket
rank, libc = int(os.environ["RANK"]), ctypes.CDLL(None, use_errno=True)
with open("/run/netns/" + {namespaces}[rank]) as namespace:
    assert libc.setns(namespace.fileno(), 0) == 0
assert libc.unshare(0x04000000) == 0  # CLONE_NEWUTS
socket.sethostname("node" + str(rank))
os.environ.update(MASTER_ADDR="{address}", LOCAL_RANK="0", LOCAL_SIZE="1")
"""


@pytest.fixture
def link() -> Iterator[netns.Link]:
    if reason := netns.link_obstacle():
        pytest.skip(reason)
    with netns.link() as link:
        yield link


def cut(link: netns.Link) -> None:
    """Set both ends of the link down, as when the switch between two nodes loses power."""
    for name in link.namespaces:
        down = ["ip", "-n", name, "link", "set", netns.INTERFACE, "down"]
        subprocess.run(down, check=True)


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        if (folder / "metrics.csv").exists() and step in losses(folder):
            return
        time.sleep(0.1)
    raise AssertionError(f"the run did not reach step {step}")


def test_two_nodes_train_as_two_ranks_of_one_and_end_when_their_link_is_cut(
    real_packages: Path, link: netns.Link
) -> None:
    """With the script, DeepSpeed's launchers and two watchdogs; only ssh is a stand-in."""
    folder = real_packages
    (folder / "recipes").mkdir()
    (folder / "recipes/m7c.py").write_text(RECIPE)
    (folder / "hosts").write_text("".join(f"{one} slots=1\n" for one in link.addresses))
    (folder / "bin").mkdir()
    second = f"ip netns exec {link.namespaces[1]} {NODE}"
    write_script(
        folder / "bin/ssh",
        f"#!/usr/bin/env bash\n[ ${{@: -2:1}} = {link.addresses[1]} ] || exit 255\n"
        f'exec {second} "hostname node1; ${{@: -1}}"\n',
    )
    environment = user_environment() | WITHOUT_COMPILER
    environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
    script = "hostname node0; exec bash launch/multinode.sh hosts --run-dir run "
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            ["ip", "netns", "exec", link.namespaces[0], *NODE.split(),
             script + " ".join([*SETTINGS, *LIMITS])],
            cwd=folder, env=environment, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        wait_for_step(folder / "run", 2)
        cut(link)
        code = process.wait(SECONDS)
    finally:
        process.kill()
        process.wait()
    text = (folder / "log").read_text()
    assert code == 4, text[-3_000:]
    assert text.count("HALT: rank ") == 2, "each node's watchdog ends its rank"
    assert read_metrics(folder / "run")[0]["tokens"] == 96 * 2 * 2, "of both nodes"


def test_the_loss_of_a_node_is_detected_at_once(tmp_path: Path, link: netns.Link) -> None:
    program = tmp_path / "moved.py"
    address = link.addresses[0]
    program.write_text(MOVE.format(namespaces=link.namespaces, address=address) + RECIPE)
    ranks = spawn_ranks(program, *SETTINGS, "--run-dir=run", folder=tmp_path)
    try:
        wait_for_step(tmp_path / "run", 2)
        ranks.started[1].kill_group()
        assert ranks.codes(SECONDS)[0] == 1
    finally:
        ranks.end()


@pytest.mark.parametrize(
    ("hosts", "flags", "words"),
    [
        (None, [], ["no such hostfile"]),
        ("# none\n", [], ["lists no node"]),
        ("a slots=2\nb slots=2\n", ["--no_ssh", "--node_rank", "2"], ["--node_rank 2", "0 to 1"]),
        ("a slots=2\nb slots=2\n", ["--no_ssh"], ["--node_rank is missing"]),
        ("a slots=2\nb slots=2\n", ["--no_ssh", "--node_rank", "1"], ["--master_addr", " a"]),
        ("a slots=2\nb slots=2\n", ["--node_rank", "1"], ["only with --no_ssh"]),
        ("a slots=2\nb.invalid slots=2\n", [], ["b.invalid", "cannot be resolved"]),
        ("a slots=2\n", ["--master_port"], ["--master_port needs a value"]),
    ],
)
def test_a_mistake_is_one_line_that_names_the_fix(
    installed_clone: Path, tmp_path: Path, hosts: str | None, flags: list[str], words: list[str]
) -> None:
    """Without a hostfile DeepSpeed itself would train on one node."""
    if hosts is not None:
        (tmp_path / "hosts").write_text(hosts)
    call = run(installed_clone, "multinode.sh", str(tmp_path / "hosts"), *flags)
    assert call.returncode == 2, call.stderr
    (line,) = call.stderr.splitlines()
    assert all(word in line for word in words), line


def test_a_node_starts_with_its_rank_and_arguments(installed_clone: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# two each\n\na slots=2\nb slots=2\n")
    flags = ["--no_ssh", "--node_rank", "1", "--master_addr", "10.0.0.1", "--restart", "3"]
    call = run(installed_clone, "multinode.sh", str(tmp_path / "hosts"), *flags, "--set", "a b")
    assert call.returncode == 0, call.stderr
    called, launched = call.stdout.splitlines()[-2:]
    recipe = str(installed_clone / "recipes/m7c.py")
    words = ["--no_ssh", "--node_rank", "1", "--master_addr", "10.0.0.1", "--master_port", "29500"]
    expected = ["--hostfile", str(tmp_path / "hosts"), *words, recipe, "--set", "a b"]
    assert launched == f"launched with {expected}"
    assert called == f"called with {['watch', '--restart', '3', '--', 'deepspeed', *expected]}"
