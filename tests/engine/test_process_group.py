"""Process group: where ranks listen, what they share of a machine, what they tell each other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.ranks import free_port, launch

LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("process_group")


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def outputs(folder: Path, port: int) -> list[list[str]]:
    """The lines of process_group_ranks.py on each rank."""
    program, planted = Path(__file__).with_name("process_group_ranks.py"), folder / "planted"
    texts = launch(program, str(planted), port=port, timeout=120)
    return [text.splitlines() for text in texts]


def test_ranks_listen_on_the_loopback_address_only_and_share_the_cores(
    outputs: list[list[str]], port: int
) -> None:
    """At the master port a stranger could join."""
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for own_threads, listening, *_ in outputs:
        assert int(own_threads) == threads
        name, *sockets = listening.split()
        assert name == "listening:"
        assert sockets, "the ranks connect to each other"
        addresses, ports = zip(*(socket.split(":") for socket in sockets), strict=True)
        assert set(addresses) <= set(LOOPBACK)
        assert f"{port:04X}" not in ports


def test_ranks_exchange_errors_and_values_and_run_no_pickle(
    outputs: list[list[str]], folder: Path
) -> None:
    seen = ["passed", "sum: 1 None", "stop: SIGTERM on rank 1"]
    seen += ["raised: rank 1 got no batch", "crash: no batch; killed"]
    path = f"PosixPath('{'ä' * 50}')"
    seen.append(f"gathered: [Entry(path=None, size=0.5)] [Entry(path={path}, size=inf)]")
    seen += ["from rank 0: rank 0", "folder: runs/0 True"]
    (*before, refusal), second = (lines[2:] for lines in outputs)
    assert second == before == seen
    assert refusal.startswith("refused: rank 1 sent b'\\x80"), "the beginning of a pickle"
    assert "no rank of this run" in refusal
    assert not (folder / "planted").exists(), "rank 1 fails at rank 0's JSON, before its own pickle"
