"""Node checks: versions, compiler, shared memory and disk."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest

from nsa.doctor import node
from nsa.doctor.node import (
    FAIL,
    GB,
    MIB,
    OK,
    WARN,
    Gpus,
    compiler_check,
    disk_check,
    kept_checkpoints,
    shm_check,
    version_check,
)


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
    check = version_check(package, version)
    assert check.status == status
    assert bool(check.fix) == (status != OK)


def test_a_missing_compiler_or_header_fails_on_gpus_only(tmp_path: Path) -> None:
    header = tmp_path / "Python.h"
    assert compiler_check("/usr/bin/cc", header, gpus=2).status == FAIL
    header.touch()
    assert compiler_check("/usr/bin/cc", header, gpus=2).status == OK
    assert compiler_check(None, header, gpus=2).status == FAIL
    assert compiler_check(None, header, gpus=0).status == WARN


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
    check = shm_check(free, gpus, peer_access)
    assert check.status == status
    assert status == OK or "--shm-size" in check.fix


@pytest.mark.parametrize(("free", "status"), [(21, FAIL), (22, WARN), (26, WARN), (27, OK)])
def test_all_kept_checkpoints_must_fit(
    free: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")(free * GB)
    monkeypatch.setattr(node.shutil, "disk_usage", lambda folder: usage)
    check = disk_check(tmp_path / "run", checkpoint_bytes=2 * GB, checkpoints=10)
    assert check.status == status
    assert "10 checkpoints of 2.00 GB and logs take 22.0 GB" in check.detail
    assert ("checkpoint.keep=3" in check.fix) == (status != OK)


@pytest.mark.parametrize(
    ("gpus", "ranks", "expected"),
    [
        (Gpus(), None, ("fail", "torch sees 0 of 2: it is a CPU build")),
        (Gpus([4]), None, ("ok", "torch sees 1")),
        (Gpus([4]), 2, ("fail", "torch sees 1, fewer than the 2 ranks")),
    ],
)
def test_a_rank_per_gpu_is_expected_unless_their_number_is_given(
    gpus: Gpus,
    ranks: int | None,
    expected: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = "GPU 0: A100 (UUID: a)\n  MIG 1g.10gb\nGPU 1: A100 (UUID: b)\n"
    monkeypatch.setattr(node, "output_of", lambda *command: listed)
    monkeypatch.setattr(node, "torch_gpus", lambda: gpus)
    checks = node.node_checks(tmp_path, parameters=1, checkpoints=1, ranks=ranks)
    of_gpus = {check.name: (check.status, check.detail) for check in checks}
    assert of_gpus["gpus"] == expected
    assert "peer access" not in of_gpus


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
    statuses = {check.name: check.status for check in checks}
    assert statuses["/dev/shm"] == status
    assert statuses["peer access"] == (OK if access else WARN)


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
def test_checkpoints_on_disk_are_counted(
    steps: int, every: int, keep: int, done: int, count: int
) -> None:
    assert kept_checkpoints(steps, every, keep, done) == count
