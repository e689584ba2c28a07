"""NCCL variables: none is needed; misspelt, invalid and slow ones are reported."""

from __future__ import annotations

import pytest

from nsa.doctor.check import FAIL, OK, WARN
from nsa.doctor.nccl import nccl_checks, p2p_disabled

INTERFACES = ("lo", "eth0", "docker0")


@pytest.mark.parametrize(
    ("variables", "status", "words"),
    [
        ({"PATH": "/bin", "HOME": "/root"}, OK, "none set"),
        ({"NCCL_DEBUG": "WARN", "NCCL_IB_DISABLE": "1"}, OK, "NCCL_DEBUG=WARN, NCCL_IB_DISABLE=1"),
        ({"NCCL_P2P_DISABLE": "0"}, OK, "NCCL_P2P_DISABLE=0"),
        ({"NCCL_P2P_DISABLE": "1"}, WARN, "slower"),
        ({"NCCL_P2P_DISABLE": "true"}, WARN, "not a valid value"),
        ({"NCCL_P2P_DISABL": "1"}, WARN, "probably misspelt"),
        ({"NCCL_P2P_LEVEL": "PBH"}, WARN, "not a valid value"),
        ({"NCCL_NVB_DISABLE": "1", "NCCL_PXN_DISABLE": "1"}, OK, "NCCL_PXN_DISABLE=1"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, WARN, "blocks the CPU"),
        ({"NCCL_SOCKET_IFNAME": "ens1"}, FAIL, "names no network interface"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, FAIL, "names no network interface"),
        ({"NCCL_SOCKET_IFNAME": "^eth,lo,docker"}, FAIL, "names no network interface"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, OK, "NCCL_SOCKET_IFNAME=eth"),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, OK, "NCCL_SOCKET_IFNAME=^docker,lo"),
    ],
)
def test_a_variable_is_checked_by_name_and_value(
    variables: dict[str, str], status: str, words: str
) -> None:
    (check,) = nccl_checks(variables, INTERFACES)
    assert check.status == status
    assert words in check.detail
    assert bool(check.fix) == (status != OK)


def test_a_misspelt_name_gets_a_suggestion() -> None:
    (check,) = nccl_checks({"NCCL_P2P_DISABL": "1"}, INTERFACES)
    assert check.fix == "did you mean NCCL_P2P_DISABLE?"


def test_either_variable_disables_peer_access() -> None:
    assert p2p_disabled({"NCCL_P2P_DISABLE": "1"})
    assert p2p_disabled({"NCCL_P2P_LEVEL": "LOC"})
    assert not p2p_disabled({"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "SYS"})
