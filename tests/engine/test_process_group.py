"""Process group: ranks of one machine connect on its loopback address, at no known port."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.ranks import free_port, launch

LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def test_ranks_of_one_machine_listen_on_the_loopback_address_only() -> None:
    listening = [line.split() for line in launch(Path(__file__).with_name("listening_ranks.py"))]
    addresses = [address.split(":") for rank in listening for address in rank]
    assert addresses, "the ranks connect to each other"
    assert {address for address, _ in addresses} <= set(LOOPBACK)


def test_nothing_listens_at_the_master_port() -> None:
    """There a stranger could join as a rank."""
    port = f"{free_port():04X}"
    program = Path(__file__).with_name("listening_ranks.py")
    for rank in launch(program, port=int(port, 16)):
        assert port not in [address.split(":")[1] for address in rank.split()]


def test_libraries_are_compiled_into_the_users_cache_folder_and_ranks_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own folder for them is in the temporary directory, where anyone can create it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    program = Path(__file__).with_name("listening_ranks.py")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    expected = f"{tmp_path}/nsa-m7c/compiled {threads}\n"
    assert launch(program, "cache") == [expected, expected]
