"""`nsa doctor`: node checks, GPU checks, output and exit codes; the code fingerprint."""

import json
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from nsa.cli import main
from nsa.doctor import node
from nsa.doctor.node import FAIL, GB, MIB, OK, SKIP, WARN, Check, Gpus
from nsa.doctor.ranks import code_fingerprint


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("deepspeed", None, FAIL),
        ("deepspeed", "0.19.3+7f3d1a", FAIL),
        ("deepspeed", "0.19.4", OK),
        ("torch", None, FAIL),
        ("torch", "2.7.1+cu128", FAIL),
        ("torch", "2.8.0", OK),
        ("torch", "2.8.0a0+5228986.nv25.06", OK),
    ],
)
def test_old_versions_are_refused(package: str, version: str | None, status: str) -> None:
    check = node.version_check(package, version)
    assert check.status == status
    assert bool(check.fix) == (status != OK)
    old = status == FAIL and version is not None
    assert check.fix.startswith(f"pip install '{package}>=") == old


def test_a_missing_compiler_or_header_fails_on_gpus_only(tmp_path: Path) -> None:
    header = tmp_path / "Python.h"
    assert node.compiler_check("/usr/bin/cc", header, gpus=2).status == FAIL
    header.touch()
    assert node.compiler_check("/usr/bin/cc", header, gpus=2).status == OK
    assert node.compiler_check(None, header, gpus=2).status == FAIL
    assert node.compiler_check(None, header, gpus=0).status == WARN


@pytest.mark.parametrize(
    ("free", "gpus", "peer_access", "status"),
    [
        (64 * MIB, 2, False, FAIL),  # Docker's default
        (64 * MIB, 2, True, WARN),
        (64 * MIB, 1, False, WARN),
        (512 * MIB, 2, False, WARN),
        (1_024 * MIB, 2, False, OK),
        (8_192 * MIB, 2, False, OK),
        (None, 2, False, FAIL),
        (None, 0, False, WARN),
    ],
)
def test_shared_memory_is_required_without_peer_access(
    free: int | None, gpus: int, peer_access: bool, status: str
) -> None:
    check = node.shm_check(free, gpus, peer_access)
    assert check.status == status
    assert status == OK or "--shm-size" in check.fix


@pytest.mark.parametrize(("free", "status"), [(21, FAIL), (22, WARN), (26, WARN), (27, OK)])
def test_all_kept_checkpoints_must_fit(
    free: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")(free * GB)
    monkeypatch.setattr(node.shutil, "disk_usage", lambda folder: usage)
    check = node.disk_check(tmp_path / "run", checkpoint_bytes=2 * GB, checkpoints=10)
    assert check.status == status
    assert "10 checkpoints of 2.00 GB and logs take 22.0 GB" in check.detail
    assert ("checkpoint.keep=3" in check.fix) == (status != OK)


@pytest.mark.parametrize(
    ("access", "variable", "status"), [(True, "0", WARN), (True, "1", FAIL), (False, "0", FAIL)]
)
def test_two_gpus_need_shared_memory_or_peer_access_that_nccl_may_use(
    access: bool, variable: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")(64 * MIB)
    monkeypatch.setattr(node.shutil, "disk_usage", lambda folder: usage)
    peers = {(0, 1): True, (1, 0): access}
    monkeypatch.setattr(node, "torch_gpus", lambda: Gpus([4, 4], peers))
    monkeypatch.setenv("NCCL_P2P_DISABLE", variable)
    checks = node.node_checks(tmp_path, parameters=1, checkpoints=1)
    by_name = {check.name: check for check in checks}
    assert by_name["/dev/shm"].status == status
    assert by_name["peer access"].status == (OK if access else WARN)
    assert access or "none 1->0: " in by_name["peer access"].detail


@pytest.mark.parametrize(
    ("steps", "every", "keep", "done", "count"),
    [
        (50_000, 5_000, 0, 0, 10),
        (50_000, 5_000, 3, 0, 4),  # the fourth exists until the first is removed
        (50_000, 5_000, 0, 45_000, 1),
        (300, 5_000, 0, 0, 1),
        (301, 100, 0, 0, 4),  # the last step is always saved
        (300, 0, 0, 0, 1),
        (300, 100, 0, 300, 1),
    ],
)
def test_checkpoints_are_counted(steps: int, every: int, keep: int, done: int, count: int) -> None:
    assert node.kept_checkpoints(steps, every, keep, done) == count


@pytest.mark.parametrize(
    ("gpus", "status", "detail"),
    [
        (Gpus([4, 4]), OK, "torch sees 2"),
        (Gpus([2_000, 4]), OK, "torch sees 2"),  # a display
        (Gpus([2_001, 4]), WARN, "GPU 0: 2,001 MiB"),
        (Gpus([4, 30_211]), WARN, "GPU 1: 30,211 MiB"),
        (Gpus([4]), OK, "torch sees 1"),  # of CUDA_VISIBLE_DEVICES: a rank per GPU
        (Gpus(), FAIL, "torch sees 0 of 2: it is a CPU build"),
        (Gpus(problem="driver is too old"), FAIL, "torch sees 0 of 2: driver is too old"),
    ],
)
def test_a_gpu_that_torch_does_not_see_or_that_is_in_use_is_reported_with_a_fix(
    gpus: Gpus, status: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = "GPU 0: A100 (UUID: a)\n  MIG 1g.10gb\nGPU 1: A100 (UUID: b)\n"
    monkeypatch.setattr(node, "output_of", lambda *command: listed)
    monkeypatch.setattr(node, "torch_gpus", lambda: gpus)
    checks = {x.name: x for x in node.node_checks(tmp_path, parameters=1, checkpoints=1)}
    check = checks.get("gpu in use", checks["gpus"])
    assert (check.status, check.detail, bool(check.fix)) == (status, detail, status != OK)
    assert ("peer access" in checks) == (len(gpus.used_mib) > 1)


def test_a_machine_without_gpus_skips_gpu_checks() -> None:
    assert node.gpu_checks(0, Gpus(), 0) == [Check("gpus", SKIP, "no GPU here")]


def test_missing_peer_access_is_reported_by_pair() -> None:
    check = node.peer_check({(0, 1): True, (1, 0): False})
    assert check.status == WARN
    assert "none 1->0: " in check.detail
    assert node.peer_check({(0, 1): True, (1, 0): True}).status == OK
    none = dict.fromkeys([(0, other) for other in range(1, 6)], False)
    assert "none 0->1, 0->2, 0->3, 0->4 and more: " in node.peer_check(none).detail


def test_nccls_variables_disable_peer_access() -> None:
    assert node.p2p_disabled({"NCCL_P2P_DISABLE": "1"})
    assert node.p2p_disabled({"NCCL_P2P_LEVEL": "loc"})
    assert node.p2p_disabled({"NCCL_P2P_LEVEL": "0"})
    assert not node.p2p_disabled({"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "SYS"})


def test_gpus_and_their_peer_access_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a ROCm build; without NVML or amdsmi no memory counts as used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda first, second: first < second)
    assert node.torch_gpus() == Gpus([0, 0], {(0, 1): True, (1, 0): False})
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda index: (index + 1) * 2**30)
    assert node.torch_gpus().used_mib == [1_024, 2_048]


def test_a_rocm_build_without_a_gpu_reports_its_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("No HIP GPUs are available")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    for name in ("cuda", "hip"):
        monkeypatch.setattr(torch.version, name, None)
    assert node.torch_gpus() == Gpus(problem="it is a CPU build")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert node.torch_gpus() == Gpus(problem="No HIP GPUs are available")


CHECKS = [
    Check("torch", OK, "2.13.0"),
    Check("/dev/shm", WARN, "512 MiB free", "docker run --shm-size=8g"),
    Check("gpu", WARN, "busy"),
    Check("topology", SKIP, "no GPU here", "never shown"),
    Check("disk", FAIL, "1 GB free", "free some"),
]


def test_a_check_is_one_line_with_the_fix_below() -> None:
    assert node.lines(CHECKS) == [
        "ok   torch     2.13.0",
        "warn /dev/shm  512 MiB free",
        "               -> docker run --shm-size=8g",
        "warn gpu       busy",
        "skip topology  no GPU here",
        "fail disk      1 GB free",
        "               -> free some",
    ]


def test_only_a_failure_prevents_a_run() -> None:
    assert not node.passed(CHECKS)
    assert node.passed(CHECKS[:4])
    assert node.failures(CHECKS) == "disk: 1 GB free (free some)"
    assert node.failures(CHECKS[:4]) == ""


def test_this_machine_passes_for_a_small_run_and_nothing_is_written(tmp_path: Path) -> None:
    checks = node.node_checks(tmp_path / "not/there", parameters=10**6, checkpoints=2)
    assert node.passed(checks), node.lines(checks)
    statuses = {check.name: check.status for check in checks}
    assert statuses["torch"] == statuses["deepspeed"] == statuses["disk"] == OK
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_small_for_the_checkpoints_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--run-dir", str(tmp_path), "--checkpoints", str(10**9)]) == 2
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fail")]
    assert len(failed) == 1
    assert "1000000000 checkpoints of 2.00 GB" in failed[0]


def test_an_impossible_run_folder_is_a_failure_without_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so are more ranks than GPUs."""
    monkeypatch.setattr(node, "torch_gpus", lambda: Gpus([4]))
    (tmp_path / "file").touch()
    assert main(["doctor", "--run-dir", str(tmp_path / "file/run"), "--ranks=2"]) == 2
    output = capsys.readouterr().out
    assert "cannot be written to: Not a directory" in output
    assert "torch sees 1, fewer than the 2 ranks" in output
    assert "-> start 1: deepspeed --num_gpus 1; or check CUDA_VISIBLE_DEVICES\n" in output


def test_json_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["doctor", "--run-dir=~/runs", "--parameters=1_000_000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (disk,) = (check["detail"] for check in found if check["name"] == "disk")
    assert f" GB free in {tmp_path}; 10 checkpoints of 0.02 GB and logs take 2.2 GB" in disk
    assert {"name": "ranks", "status": "skip"}.items() <= found[-1].items()
    assert all(set(check) == {"name", "status", "detail", "fix"} for check in found)


def test_the_fingerprint_depends_on_file_names_and_contents(tmp_path: Path) -> None:
    def fingerprint_of(name: str, text: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
        return code_fingerprint(folder)

    first = fingerprint_of("ops/a.py", "x = 1\n")
    assert fingerprint_of("ops/a.py", "x = 1\n") == first
    assert fingerprint_of("ops/a.py", "x = 2\n") != first
    assert fingerprint_of("ops/b.py", "x = 1\n") != first
    assert len(code_fingerprint()) == 12
