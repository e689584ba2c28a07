"""Versions, compiler, memory, disk and limits: refused where a run would die."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa.doctor.check import FAIL, OK, WARN
from nsa.doctor.node import (
    GB,
    MIB,
    Disk,
    compiler_check,
    deepspeed_check,
    disk_checks,
    limits_checks,
    memory_check,
    python_check,
    shm_check,
    torch_check,
    triton_check,
)

PINNED = ["filelock", 'triton==3.7.1; platform_system == "Linux" and platform_machine == "x86_64"']


@pytest.mark.parametrize(
    ("version", "status"),
    [
        (None, FAIL),
        ("0.16.9", WARN),
        ("0.17.5", WARN),
        ("0.17.6", FAIL),
        ("0.18.2+7f3d1a", FAIL),
        ("0.18.3", FAIL),
        ("0.19.3", FAIL),
        ("0.19.4", OK),
        ("0.19.8", OK),
        ("0.20.0", OK),
    ],
)
def test_deepspeeds_that_compute_something_wrong_are_refused(
    version: str | None, status: str
) -> None:
    found = deepspeed_check(version)
    assert found.status == status
    assert bool(found.fix) == (status != OK)


@pytest.mark.parametrize(
    ("version", "status"),
    [(None, FAIL), ("2.7.1+cu128", FAIL), ("2.8.0", OK), ("2.13.0+cpu", OK), ("3.0.0", OK)],
)
def test_old_torches_are_refused(version: str | None, status: str) -> None:
    assert torch_check(version).status == status


def test_old_pythons_are_refused() -> None:
    assert python_check((3, 9, 18)).status == FAIL
    assert python_check((3, 10, 0)).status == OK
    assert python_check((4, 0, 0)).status == OK


@pytest.mark.parametrize(
    ("torch", "triton", "requirements", "status"),
    [
        ("2.13.0+cu130", "3.7.1", PINNED, OK),
        ("2.13.0+cu130", "3.7.1+git1234", PINNED, OK),
        ("2.13.0+cu130", "3.6.0", PINNED, FAIL),
        ("2.13.0+cu130", None, PINNED, FAIL),
        ("2.12.0", "3.6.0", ["triton==3.7.1"], FAIL),  # torch's own word, of any torch
        ("2.13.0+cpu", "3.7.1", ["filelock"], OK),
        ("2.13.0+cpu", "3.4.0", ["filelock"], FAIL),
        ("2.11.0+cpu", "3.4.0", ["filelock"], OK),  # nobody says which it wants
    ],
)
def test_triton_is_the_one_that_torch_asks_for(
    torch: str, triton: str | None, requirements: list[str], status: str
) -> None:
    found = triton_check(torch, triton, requirements, gpus=1)
    assert found.status == status
    assert status == OK or found.fix == "pip install triton==3.7.1"
    without_gpu = triton_check(torch, triton, requirements, gpus=0)
    assert without_gpu.status == (WARN if status == FAIL else OK)


def test_a_missing_compiler_or_header_stops_a_run_on_gpus_only(tmp_path: Path) -> None:
    header = tmp_path / "Python.h"
    assert compiler_check("/usr/bin/cc", header, gpus=2).status == FAIL
    header.touch()
    assert compiler_check("/usr/bin/cc", header, gpus=2).status == OK
    assert compiler_check(None, header, gpus=2).status == FAIL
    assert compiler_check(None, header, gpus=0).status == WARN


@pytest.mark.parametrize(
    ("free", "gpus", "peer_access", "status"),
    [
        (64 * MIB, 2, False, FAIL),  # what Docker gives
        (64 * MIB, 2, True, WARN),
        (64 * MIB, 1, False, WARN),
        (512 * MIB, 2, False, WARN),
        (8_192 * MIB, 2, False, OK),
        (None, 2, False, FAIL),
        (None, 0, False, WARN),
    ],
)
def test_shared_memory_is_needed_where_gpus_do_not_reach_each_other(
    free: int | None, gpus: int, peer_access: bool, status: str
) -> None:
    found = shm_check(free, gpus, peer_access)
    assert found.status == status
    assert status == OK or "--shm-size" in found.fix


@pytest.mark.parametrize(("free", "status"), [(21, FAIL), (23, WARN), (27, OK)])
def test_all_checkpoints_that_will_be_kept_have_to_fit(free: int, status: str) -> None:
    disk = Disk(Path("/data"), free * GB, 10**6, None)
    found = disk_checks(disk, checkpoint_bytes=2 * GB, checkpoints=10)[1]
    assert found.status == status
    assert "10 checkpoints of 2.00 GB and logs take 22.0 GB" in found.detail


def test_few_inodes_are_warned_of_and_none_at_all_are_not() -> None:
    few = disk_checks(Disk(Path("/data"), 10**12, 200, None), 1, 1)
    assert [check.status for check in few] == [OK, OK, WARN]
    endless = disk_checks(Disk(Path("/data"), 10**12, None, None), 1, 1)
    assert [check.status for check in endless] == [OK, OK]


def test_memory_is_counted_for_each_rank() -> None:
    assert memory_check(200 * GB, ranks=2, checkpoint_bytes=2 * GB).status == OK
    assert memory_check(5 * GB, ranks=2, checkpoint_bytes=2 * GB).status == WARN
    assert memory_check(5 * GB, ranks=1, checkpoint_bytes=2 * GB).status == OK
    assert memory_check(1 * GB, ranks=2, checkpoint_bytes=2 * GB).status == FAIL


def test_limits_of_the_shell_that_a_run_would_hit_are_found() -> None:
    assert [check.status for check in limits_checks({"files": None, "file_size": None}, GB)] == [OK]
    tight = limits_checks({"files": 256, "file_size": 10**6}, GB)
    assert [(check.status, check.fix) for check in tight] == [
        (WARN, "ulimit -n 65536"),
        (FAIL, "ulimit -f unlimited"),
    ]
