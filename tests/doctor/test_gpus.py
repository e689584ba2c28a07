"""GPU checks against recorded output of nvidia-smi."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nsa.doctor import pcie
from nsa.doctor.node import (
    FAIL,
    OK,
    SKIP,
    WARN,
    Check,
    TorchGpus,
    gpu_checks,
    p2p_disabled,
    parse_gpus,
    parse_topology,
    topology_check,
    torch_gpus,
)
from tests.doctor.recorded import (
    TOPO_NVLINK,
    TOPO_PHB,
    TOPO_SYS,
    UUIDS,
    nvidia_smi,
)

TORCH = TorchGpus(list(UUIDS))


def check(text: str, in_torch: TorchGpus = TORCH, ranks: int = 2) -> list[Check]:
    return gpu_checks(parse_gpus(text), in_torch, ranks)


def test_two_healthy_a100s_pass() -> None:
    assert check(nvidia_smi()) == [Check("gpus", OK, "nvidia-smi lists 2; torch sees 2")]
    assert [gpu.uuid for gpu in parse_gpus(nvidia_smi())] == list(UUIDS)


def test_values_that_a_board_does_not_report_are_accepted() -> None:
    assert [c.status for c in check(nvidia_smi(used="[N/A]"))] == [OK]


@pytest.mark.parametrize(
    ("text", "in_torch", "status", "words"),
    [
        (nvidia_smi(), TorchGpus(), FAIL, "torch sees 0: it is a CPU build"),
        (nvidia_smi(), TorchGpus(problem="driver is too old"), FAIL, "driver is too old"),
        (nvidia_smi(), TorchGpus([UUIDS[0]]), FAIL, "torch sees 1, fewer than the 2 ranks"),
        (nvidia_smi(used=30_211), TORCH, WARN, "GPU 1: 30,211 MiB"),
    ],
)
def test_a_gpu_problem_is_reported_with_a_fix(
    text: str, in_torch: TorchGpus, status: str, words: str
) -> None:
    (problem,) = [c for c in check(text, in_torch) if c.status != OK]
    assert problem.status == status
    assert words in problem.detail
    assert problem.fix


def test_a_machine_without_gpus_skips_gpu_checks() -> None:
    assert check("", TorchGpus()) == [Check("gpus", SKIP, "no GPU here")]


def test_topology_is_parsed_with_and_without_terminal_underlining() -> None:
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


@pytest.mark.parametrize(
    ("topology", "status", "detail"),
    [
        (TOPO_PHB, OK, "GPU 0 and 1: PHB"),
        (TOPO_NVLINK, OK, "GPU 0 and 1: NV12"),
        (
            TOPO_SYS,
            OK,
            "GPU 0 and 1: PIX; GPU 0 and 2: SYS; GPU 0 and 3: SYS; and 3 more pairs",
        ),
        ("", SKIP, "nvidia-smi topo -m is not readable"),
    ],
)
def test_topology_names_the_link_of_each_pair(topology: str, status: str, detail: str) -> None:
    check = topology_check(parse_topology(topology), {})
    assert (check.status, check.detail) == (status, detail)


def test_missing_peer_access_is_reported_by_pair() -> None:
    links = parse_topology(TOPO_PHB)
    check = topology_check(links, {(0, 1): True, (1, 0): False})
    assert check.status == WARN
    assert "1->0" in check.detail
    assert "0->1" not in check.detail
    assert topology_check(links, {(0, 1): True, (1, 0): True}).status == OK


def test_nccls_variables_disable_peer_access() -> None:
    assert p2p_disabled({"NCCL_P2P_DISABLE": "1"})
    assert p2p_disabled({"NCCL_P2P_LEVEL": "LOC"})
    assert p2p_disabled({"NCCL_P2P_LEVEL": "0"})
    assert not p2p_disabled({"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "SYS"})


def test_a_rocm_build_of_torch_is_not_taken_for_a_cpu_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without nvidia-smi: what it would have told is named, and peer access comes from torch."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=UUIDS[i])
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    gpus = torch_gpus()
    assert gpus.uuids == list(UUIDS)
    detail = "ROCm 7.0: torch sees 2; memory in use is not read"
    assert check("", gpus) == [Check("gpus", OK, detail)]
    topology = topology_check({}, gpus.peers, gpus.rocm)
    assert topology.status == SKIP
    assert "links of AMD's GPUs are not read: rocm-smi --showtopo" in topology.detail
    missing = topology_check({}, {(0, 1): False}, gpus.rocm)
    assert (missing.status, "no peer access 0->1" in missing.detail) == (WARN, True)


def test_a_rocm_build_without_a_gpu_reports_its_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("No HIP GPUs are available")

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    assert torch_gpus() == TorchGpus(problem="No HIP GPUs are available", rocm="7.0")


def test_the_settings_of_pcie_are_refused_on_amds_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pcie, "output_of", lambda *_: "")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(SystemExit, match="needs nvidia-smi, and this torch is a ROCm build"):
        pcie.main()
