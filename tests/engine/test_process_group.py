"""Process group: where the ranks of one machine listen, and what they share of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.ranks import free_port, launch

LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def test_ranks_listen_on_the_loopback_address_only_and_compile_into_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the master port a stranger could join; anyone can create a folder in the temporary one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    port, threads = free_port(), max(1, len(os.sched_getaffinity(0)) // 2)
    for output in launch(Path(__file__).with_name("listening_ranks.py"), port=port):
        cache, *listening = output.splitlines()
        assert cache == f"{tmp_path}/nsa-m7c/compiled {threads}"
        assert listening, "the ranks connect to each other"
        addresses, ports = zip(*(address.split(":") for address in listening), strict=True)
        assert set(addresses) <= set(LOOPBACK)
        assert f"{port:04X}" not in ports
