"""This machine: the network interface towards another one."""

from __future__ import annotations

import socket

import psutil
import pytest

from nsa.system import interface_towards


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "nowhere.invalid"])
def test_ranks_on_one_host_use_the_loopback(address: str) -> None:
    assert interface_towards(address) is None


def test_the_interface_with_the_address_is_found() -> None:
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                assert interface_towards(entry.address) == name
                return
    pytest.skip("this machine has no network interface but the loopback")
