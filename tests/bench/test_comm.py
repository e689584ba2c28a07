"""Communication is measured on a real link between two network namespaces, removed afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.bench.__main__ import main
from tests.bench.comm import CONFIGS, Bench, CommCase
from tests.netns import INTERFACE, PREFIX, link, link_obstacle, remove_leftovers
from tests.ranks import ROOT, WITHOUT_COMPILER

needs_link = pytest.mark.skipif(bool(link_obstacle()), reason=f"needs a link: {link_obstacle()}")
MEASURED = ROOT / "docs/benchmarks/comm.json"
TINY = {
    "vocab_size": 272,
    "layers": 2,
    "width": 128,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 64,
    "mlp_width": 512,
    "spec": {"block_len": 8, "block_stride": 4, "select_len": 8, "select_top": 4, "window": 12},
}
HOLD = "import sys, time\nfrom tests.netns import link\nwith link():\n"
HOLD += "    print('up', flush=True)\n    time.sleep(60)\n"
GBIT = 0.2


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch, link() as veth:
        for name, value in WITHOUT_COMPILER.items():
            patch.setenv(name, value)
        with closing(Bench(veth, [GBIT], TINY, tokens=32, compute=False)) as bench:
            yield bench


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
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (CommCase("zero1_pcie", 2, "bf16"), 3.0),
        pytest.param(CommCase("zero1_pcie", 2, "fp32"), 5.0, marks=pytest.mark.full),
        pytest.param(CommCase("zero2_pcie", 2, "bf16"), 5.0, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_link_carries_the_bytes_of_the_zero_stage(
    bench: Bench, case: CommCase, expected: float
) -> None:
    (row,) = bench.measure(case)
    assert row["bytes_per_parameter_per_step"] == pytest.approx(expected, rel=0.02)
    assert row["payload_bytes_per_parameter_per_step"] == pytest.approx(expected, rel=0.02)
    sent = row["bytes_per_parameter_per_step"] * row["parameters"]
    assert min(row["step_seconds_all"]) > 0.8 * sent * 8 / GBIT / 1e9, "the link is not throttled"


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


@needs_link
def test_a_link_is_visible_in_its_namespaces_only() -> None:
    with link() as created:
        assert set(created.namespaces) <= namespaces()
        assert not Path("/sys/class/net", INTERFACE).exists()
        for end in range(2):
            inside = ["ip", "netns", "exec", created.namespaces[end], "ls", "/sys/class/net"]
            listed = subprocess.run(inside, capture_output=True, text=True, check=True)
            assert INTERFACE in listed.stdout.split()
    assert not namespaces() & set(created.namespaces)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_without_root_the_error_says_what_is_needed() -> None:
    os.seteuid(65_534)
    try:
        with pytest.raises(ValueError, match=r"needs root on Linux with ip and tc: .* as root"):
            main(["comm"])
    finally:
        os.seteuid(0)


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="ip and tc not found; install iproute2"):
        main(["comm"])


def test_the_page_has_the_measured_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["comm", "--show", str(MEASURED)])
    table = capsys.readouterr().out
    assert table.count("\n") == 2 + len(CONFIGS)
    assert table in (ROOT / "docs/benchmarks/communication.md").read_text()
