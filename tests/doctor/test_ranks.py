"""Ranks learn of each other what would spoil a run, all learn the same, and none waits for ever."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nsa.doctor.check import FAIL, OK, WARN, Check
from nsa.doctor.ranks import AllReduce, Facts, all_reduce_check, compare
from tests.ranks import launch

Found = dict[str, dict[str, Check]]
FACTS = Facts("node1", "c0de", "steps: 3", {"torch": "2.13.0"}, "NVIDIA A100", "gpu-a", {})
OTHER, THIRD = replace(FACTS, device_id="gpu-b"), replace(FACTS, device_id="gpu-c")


@pytest.fixture(scope="module")
def found() -> Found:
    """By situation and name, what two real ranks were told; both were told the same."""
    first, second = launch(Path(__file__).with_name("preflight_ranks.py"), timeout=120)
    assert first == second
    return {
        situation: {check["name"]: Check(**check) for check in checks}
        for situation, checks in json.loads(first).items()
    }


def test_ranks_that_are_alike_are_well_and_the_link_has_a_speed(found: Found) -> None:
    well = found["well"]
    assert {name for name, check in well.items() if check.status != OK} == {"disk"}
    words = well["all-reduce"].detail.split()
    assert words[:5] == ["4", "MB", "over", "2", "ranks"]
    assert float(words[-2]) > 0
    assert words[-1] == "GB/s"


def test_what_one_rank_found_on_its_machine_all_ranks_hear(found: Found) -> None:
    assert found["well"]["disk"] == Check("disk", WARN, "nearly full", "free some")


def test_a_rank_with_other_code_or_settings_is_named_with_the_difference(found: Found) -> None:
    unlike = found["unlike"]
    assert {name for name, check in unlike.items() if check.status == FAIL} == {"code", "config"}
    assert "rank 1: 0123456789ab against " in unlike["code"].detail
    assert "rank 1: line 2 is 'steps: 400' against 'steps: 300'" in unlike["config"].detail


def test_a_clock_that_is_off_is_warned_of(found: Found) -> None:
    assert found["unlike"]["clocks"].status == WARN
    assert found["unlike"]["clocks"].detail.startswith("rank 1 (")
    assert "+5.0 s" in found["unlike"]["clocks"].detail
    assert found["well"]["clocks"].status == OK


def test_sums_that_are_wrong_on_one_rank_fail_on_both(found: Found) -> None:
    check = found["wrong sum"]["all-reduce"]
    assert (check.status, check.detail) == (
        FAIL,
        "of 1 MB: rank 1: 3 of 250,000 sums are wrong",
    )


def test_a_link_that_hangs_is_reported_and_not_waited_for(found: Found) -> None:
    check = found["hang"]["all-reduce"]
    assert check.status == FAIL
    assert "rank 0: had not ended" in check.detail
    assert "rank 1: had not ended" in check.detail
    assert "NCCL_P2P_DISABLE=1" in check.fix


def test_an_error_on_one_rank_is_told_by_both(found: Found) -> None:
    check = found["broken"]["all-reduce"]
    assert check.status == FAIL
    assert "rank 1: RuntimeError: NCCL error: unhandled system error" in check.detail
    assert "last error" not in check.detail


def status_of(name: str, *ranks: Facts) -> Check:
    return next(check for check in compare(ranks) if check.name == name)


def test_two_ranks_on_one_gpu_fail_and_equal_names_on_two_machines_do_not() -> None:
    same = status_of("devices", FACTS, FACTS)
    assert (same.status, "ranks 0 and 1 share one GPU" in same.detail) == (FAIL, True)
    assert status_of("devices", FACTS, OTHER).status == OK
    assert status_of("devices", FACTS, replace(FACTS, host="node2")).status == OK


def test_another_gpu_or_nccl_variable_is_warned_of_and_another_version_fails() -> None:
    for name, other, status in (
        ("devices", replace(THIRD, device="NVIDIA H100"), WARN),
        ("nccl on ranks", replace(THIRD, nccl={"NCCL_ALGO": "Ring"}), WARN),
        ("versions", replace(THIRD, versions={"torch": "2.12.0"}), FAIL),
    ):
        check = status_of(name, FACTS, OTHER, other)
        assert check.status == status
        assert "rank 2: " in check.detail
        assert "rank 1: " not in check.detail


def test_the_slowest_rank_gives_the_speed_and_slow_gpus_are_warned_of() -> None:
    times = [AllReduce(0.010), AllReduce(0.025)]
    assert "10.24 GB/s" in all_reduce_check(times, 256, gpus=True).detail
    slow = [AllReduce(0.2), AllReduce(0.2)]
    assert all_reduce_check(slow, 256, gpus=True).status == WARN
    assert all_reduce_check(slow, 256, gpus=False).status == OK
    four = [AllReduce(0.05)] * 4
    assert "7.68 GB/s" in all_reduce_check(four, 256, gpus=True).detail
