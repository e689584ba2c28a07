"""GPUs and what is between them, judged by what programs print on such machines."""

from __future__ import annotations

import pytest

from nsa.doctor.check import FAIL, OK, SKIP, WARN, Check
from nsa.doctor.gpus import (
    acs_check,
    gpu_checks,
    parse_gpus,
    parse_topology,
    peer_check,
    topology_check,
)
from tests.doctor.recorded import (
    GEFORCE,
    LSPCI_ACS,
    LSPCI_CLEAR,
    LSPCI_USER,
    TOPO_NVLINK,
    TOPO_PHB,
    TOPO_SYS,
    UUIDS,
    nvidia_smi,
)


def judge(text: str, visible: int = 2, built_for: str | None = "13.0", ranks: int = 2) -> list:
    return gpu_checks(parse_gpus(text), visible, built_for, ranks)


def only(checks: list[Check], status: str) -> Check:
    found = [check for check in checks if check.status == status]
    assert len(found) == 1, checks
    return found[0]


def test_two_a100s_that_are_well_are_named_and_nothing_is_said_against_them() -> None:
    checks = judge(nvidia_smi())
    assert {check.status for check in checks} == {OK}
    assert checks[-1].detail == "2 x NVIDIA A100 80GB PCIe, 81,920 MiB; torch sees 2"
    assert [gpu.uuid for gpu in parse_gpus(nvidia_smi())] == list(UUIDS)


def test_what_a_board_does_not_tell_is_no_complaint() -> None:
    assert {check.status for check in judge(GEFORCE, visible=1, ranks=1)} == {OK}


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"used": 30_211}, "GPU 1: 30,211 MiB are taken"),
        ({"ecc": 3}, "GPU 1: 3 uncorrected memory errors"),
        ({"reasons": "0x0000000000000060"}, "GPU 1 is slowed down by heat (driver), heat"),
        ({"width": 8}, "GPU 1 uses 8 of 16 PCIe lanes"),
        ({"persistence": "Disabled"}, "off on GPU 1"),
    ],
)
def test_a_gpu_in_trouble_is_named_with_a_mend(second: dict[str, object], words: str) -> None:
    found = only(judge(nvidia_smi(**second)), WARN)
    assert words in found.detail
    assert found.fix


@pytest.mark.parametrize(
    ("text", "visible", "built_for", "words"),
    [
        (nvidia_smi(), 0, None, "built for the CPU"),
        (nvidia_smi(), 0, "13.0", "can use none"),
        (nvidia_smi(driver="570.86.15").replace("580.65.06", "570.86.15"), 2, "13.0", "older"),
        (nvidia_smi(), 1, "13.0", "torch sees 1, fewer than the 2 ranks"),
    ],
)
def test_what_no_run_survives_fails(
    text: str, visible: int, built_for: str | None, words: str
) -> None:
    found = only(judge(text, visible, built_for), FAIL)
    assert words in found.detail
    assert found.fix


def test_a_driver_of_the_same_major_cuda_is_new_enough() -> None:
    old = nvidia_smi().replace("580.65.06", "535.104.05")
    assert {check.status for check in judge(old, built_for="12.8")} == {OK}


def test_two_models_of_gpu_are_warned_of() -> None:
    mixed = nvidia_smi().replace("A100 80GB PCIe", "A100-PCIE-40GB", 1)
    assert "A100 80GB PCIe" in only(judge(mixed), WARN).detail


def test_a_machine_without_gpus_is_not_blamed_for_it() -> None:
    checks = [
        *judge("", visible=0, built_for=None),
        peer_check({}, 0),
        topology_check({}, 0),
        acs_check(None, 20, "quiet", 0),
    ]
    assert {(check.status, check.detail) for check in checks} == {(SKIP, "no GPU here")}


def test_the_matrix_of_links_is_read_with_and_without_a_terminals_underlining() -> None:
    assert parse_topology(TOPO_PHB) == {(0, 1): "PHB"}
    assert parse_topology(TOPO_NVLINK) == {(0, 1): "NV12"}
    assert parse_topology("") == {}
    four = parse_topology(TOPO_SYS)
    assert {pair for pair, link in four.items() if link == "PIX"} == {(0, 1), (2, 3)}
    assert {pair for pair, link in four.items() if link == "SYS"} == {
        (0, 2),
        (0, 3),
        (1, 2),
        (1, 3),
    }


def test_the_link_says_what_to_expect_and_only_one_between_processors_is_warned_of() -> None:
    host_bridge = topology_check(parse_topology(TOPO_PHB), 2)
    assert (host_bridge.status, "8 to 20 GB/s" in host_bridge.detail) == (OK, True)
    nvlink = topology_check(parse_topology(TOPO_NVLINK), 2)
    assert (nvlink.status, "NVLink (NV12)" in nvlink.detail) == (OK, True)
    across = topology_check(parse_topology(TOPO_SYS), 4)
    assert (across.status, "3 pairs more" in across.detail) == (WARN, True)
    assert "NUMA" in across.fix


def test_missing_peer_access_is_warned_of_by_pair() -> None:
    found = peer_check({(0, 1): True, (1, 0): False}, 2)
    assert found.status == WARN
    assert "1->0" in found.detail
    assert "0->1" not in found.detail
    assert peer_check({(0, 1): True, (1, 0): True}, 2).status == OK


def test_bridges_that_redirect_are_named_with_the_cure_and_the_safe_way() -> None:
    found = acs_check(LSPCI_ACS, 40, "quiet iommu=pt", 2)
    assert found.status == WARN
    assert "16:00.0" in found.detail
    assert "setpci -s 16:00.0" in found.fix
    assert "NCCL_P2P_DISABLE=1" in found.fix
    assert acs_check(LSPCI_CLEAR, 40, "quiet iommu=pt", 2).status == OK


def test_an_iommu_in_the_way_is_found_without_the_right_to_read_acs() -> None:
    found = acs_check(LSPCI_USER, 40, "BOOT_IMAGE=/vmlinuz intel_iommu=on quiet", 2)
    assert (found.status, "iommu=pt" in found.fix) == (WARN, True)
    unread = acs_check(LSPCI_USER, 0, "quiet", 2)
    assert (unread.status, "ACS cannot be read" in unread.detail) == (OK, True)
