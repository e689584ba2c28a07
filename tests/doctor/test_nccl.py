"""Variables of NCCL: none is needed, and one that does nothing or harm is named."""

from __future__ import annotations

import pytest

from nsa.doctor.check import FAIL, OK, WARN
from nsa.doctor.nccl import nccl_checks, peers_switched_off

INTERFACES = ("lo", "eth0", "docker0")


@pytest.mark.parametrize(
    ("variables", "status", "words"),
    [
        ({"PATH": "/bin", "HOME": "/root"}, OK, "none is set"),
        ({"NCCL_DEBUG": "WARN", "NCCL_IB_DISABLE": "1"}, OK, "NCCL_DEBUG=WARN, NCCL_IB_DISABLE=1"),
        ({"NCCL_P2P_DISABLE": "0"}, OK, "NCCL_P2P_DISABLE=0"),
        ({"NCCL_P2P_DISABLE": "1"}, WARN, "slower"),
        ({"NCCL_P2P_DISABLE": "true"}, WARN, "neither 0 nor 1"),
        ({"NCCL_P2P_DISABL": "1"}, WARN, "documents no such variable"),
        ({"NCCL_P2P_LEVEL": "PBH"}, WARN, "no value of it"),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, WARN, "an old name"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, WARN, "waited for"),
        ({"NCCL_SOCKET_IFNAME": "ens1"}, FAIL, "names no network interface"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, FAIL, "names no network interface"),
        ({"NCCL_SOCKET_IFNAME": "^eth,lo,docker"}, FAIL, "names no network interface"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, OK, "NCCL_SOCKET_IFNAME=eth"),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, OK, "NCCL_SOCKET_IFNAME=^docker,lo"),
    ],
)
def test_a_variable_is_judged_by_its_name_and_value(
    variables: dict[str, str], status: str, words: str
) -> None:
    (found,) = nccl_checks(variables, INTERFACES)
    assert found.status == status
    assert words in found.detail
    assert bool(found.fix) == (status != OK)


def test_the_right_name_of_a_misspelt_one_is_given() -> None:
    (found,) = nccl_checks({"NCCL_P2P_DISABL": "1"}, INTERFACES)
    assert found.fix == "did you mean NCCL_P2P_DISABLE?"


def test_peers_are_off_by_either_variable() -> None:
    assert peers_switched_off({"NCCL_P2P_DISABLE": "1"})
    assert peers_switched_off({"NCCL_P2P_LEVEL": "LOC"})
    assert not peers_switched_off({"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "SYS"})
