"""GPU checks, and the links of recorded output of nvidia-smi."""

from __future__ import annotations

import pytest
import torch

from nsa.doctor.node import (
    FAIL,
    OK,
    SKIP,
    WARN,
    Check,
    Gpus,
    gpu_checks,
    p2p_disabled,
    peer_check,
    torch_gpus,
)

TWO = Gpus([4, 4])


def test_two_healthy_a100s_pass() -> None:
    assert gpu_checks(2, TWO, 2) == [Check("gpus", OK, "torch sees 2")]
    displays = Gpus([2_000, 4])
    assert gpu_checks(2, displays, 2) == gpu_checks(2, TWO, 2)


@pytest.mark.parametrize(
    ("gpus", "status", "words"),
    [
        (Gpus(), FAIL, "torch sees 0 of 2: it is a CPU build"),
        (Gpus(problem="driver is too old"), FAIL, "driver is too old"),
        (Gpus([4]), FAIL, "torch sees 1, fewer than the 2 ranks"),
        (Gpus([4, 30_211]), WARN, "GPU 1: 30,211 MiB"),
        (Gpus([2_001, 4]), WARN, "GPU 0: 2,001 MiB"),
    ],
)
def test_a_gpu_problem_is_reported_with_a_fix(gpus: Gpus, status: str, words: str) -> None:
    (problem,) = [check for check in gpu_checks(2, gpus, 2) if check.status != OK]
    assert problem.status == status
    assert words in problem.detail
    assert problem.fix


def test_a_machine_without_gpus_skips_gpu_checks() -> None:
    assert gpu_checks(0, Gpus(), 0) == [Check("gpus", SKIP, "no GPU here")]


def test_missing_peer_access_is_reported_by_pair() -> None:
    check = peer_check({(0, 1): True, (1, 0): False})
    assert check.status == WARN
    assert "none 1->0: " in check.detail
    assert peer_check({(0, 1): True, (1, 0): True}).status == OK
    none = dict.fromkeys([(0, other) for other in range(1, 6)], False)
    assert "none 0->1, 0->2, 0->3, 0->4 and more: " in peer_check(none).detail


def test_nccls_variables_disable_peer_access() -> None:
    assert p2p_disabled({"NCCL_P2P_DISABLE": "1"})
    assert p2p_disabled({"NCCL_P2P_LEVEL": "loc"})
    assert p2p_disabled({"NCCL_P2P_LEVEL": "0"})
    assert not p2p_disabled({"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "SYS"})


def test_gpus_and_their_peer_access_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a ROCm build; without NVML or amdsmi no memory counts as used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda first, second: first < second)
    assert torch_gpus() == Gpus([0, 0], {(0, 1): True, (1, 0): False})
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda index: (index + 1) * 2**30)
    assert torch_gpus().used_mib == [1_024, 2_048]


def test_a_rocm_build_without_a_gpu_reports_its_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("No HIP GPUs are available")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    for name in ("cuda", "hip"):
        monkeypatch.setattr(torch.version, name, None)
    assert torch_gpus() == Gpus(problem="it is a CPU build")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert torch_gpus() == Gpus(problem="No HIP GPUs are available")
