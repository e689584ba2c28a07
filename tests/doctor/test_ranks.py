"""Rank checks: all ranks return the same list, name the rank that differs, and never hang."""

import json
import platform
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.doctor.node import FAIL, OK, SKIP, WARN, Check
from nsa.doctor.ranks import Facts, _facts, all_reduce_check, compare, rank_checks
from tests.ranks import launch

CPU = torch.device("cpu")
Results = dict[str, dict[str, Check]]
VALUES = {
    "code": {"": "c0de"},
    "config": {"line 1": "steps: 3"},
    "versions": {"torch": "2.13.0"},
    "devices": {"": "NVIDIA A100"},
}
WARNING = Check("disk", WARN, "nearly full", "free some")
FACTS, OTHER, THIRD = (VALUES | {"place": {"host": "node1", "gpu": f"gpu-{x}"}} for x in "abc")


@pytest.fixture(scope="module")
def results() -> Results:
    """Checks by fault and name, from two real ranks; both returned the same."""
    first, second = launch(Path(__file__).with_name("preflight_ranks.py"), timeout=120)
    assert first == second
    return {
        fault: {check["name"]: Check(**check) for check in checks}
        for fault, checks in json.loads(first).items()
    }


def test_healthy_ranks_pass_with_a_nodes_warning_and_the_links_speed(results: Results) -> None:
    healthy = results["healthy"]
    assert {name for name, check in healthy.items() if check.status != OK} == {"disk"}
    assert healthy["disk"] == WARNING
    words = healthy["all-reduce"].detail.split()
    assert words[:5] == ["4", "MB", "over", "2", "ranks"]
    assert float(words[-2]) > 0
    assert words[-1] == "GB/s"


def test_a_rank_with_other_code_or_config_is_named_with_the_difference(results: Results) -> None:
    different = results["different"]
    failed = {name for name, check in different.items() if check.status == FAIL}
    assert failed == {"code", "config"}
    assert "rank 1: '0123456789ab', not '" in different["code"].detail
    assert "rank 1: line 2 'steps: 400', not 'steps: 300'" in different["config"].detail


@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        ("wrong sum", "of 4 MB: rank 1: 3 of 1,000,000 sums are wrong"),
        ("hang", "rank 0: did not end .*rank 1: did not end "),
        ("broken", "rank 1: RuntimeError: NCCL error: unhandled system error(?!.*last error)"),
    ],
)
def test_a_faulty_link_fails_both_ranks_in_time(fault: str, detail: str, results: Results) -> None:
    check = results[fault]["all-reduce"]
    assert check.status == FAIL
    assert re.search(detail, check.detail)
    assert fault != "hang" or "NCCL_P2P_DISABLE=1" in check.fix


def test_a_check_of_one_of_several_hosts_names_its_host() -> None:
    def gather(value: Any, kind: Any) -> list[Any]:
        other = value | {"place": {"host": "node2", "gpu": ""}} if kind is Facts else value
        return [value, other]

    both = [WARNING, Check("torch", OK, "2.13.0")]
    checks = rank_checks(device=CPU, gather=gather, node_checks=both)
    names = [f"{check.name} ({platform.node()})" for check in both]
    assert [check.name for check in checks[:4]] == 2 * names


def test_two_ranks_on_one_gpu_never_meet_in_an_all_reduce() -> None:
    def gather(value: Any, kind: Any) -> list[Any]:
        return [value | {"place": {"host": "node1", "gpu": "a"}}] * 2 if kind is Facts else [value]

    checks = rank_checks(device=CPU, gather=gather)
    last = [(check.name, check.status) for check in checks[-2:]]
    assert last == [("devices", FAIL), ("all-reduce", SKIP)]


def test_one_rank_has_nothing_to_compare_and_no_link_to_warn_about() -> None:
    checks = rank_checks(device=CPU, gather=lambda value, _: [value], node_checks=[WARNING])
    assert checks == [WARNING, Check("ranks", SKIP, "one rank: nothing to compare")]


def test_a_rank_whose_gpu_is_broken_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for its facts."""

    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: device busy\nFor debugging consider more.")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    facts = _facts("", torch.device("cuda", 1))
    assert facts["devices"] == {"": "cuda:1 that cannot be used: CUDA error: device busy"}


def check_of(name: str, *ranks: Facts) -> Check:
    return next(check for check in compare(ranks) if check.name == name)


def test_two_ranks_on_one_gpu_fail_and_equal_uuids_on_two_hosts_do_not() -> None:
    same = check_of("devices", FACTS, FACTS)
    assert (same.status, "ranks 0 and 1 share one GPU" in same.detail) == (FAIL, True)
    assert check_of("devices", FACTS, OTHER).status == OK
    elsewhere = FACTS | {"place": {"host": "node2", "gpu": "gpu-a"}}
    assert check_of("devices", FACTS, elsewhere).status == OK


@pytest.mark.parametrize(
    ("name", "values", "status"),
    [
        ("devices", {"": "NVIDIA H100"}, WARN),
        ("versions", {"torch": "2.12.0"}, FAIL),
        ("versions", {"torch": "2.13.0", "nccl": "2.27"}, FAIL),
    ],
)
def test_a_rank_that_differs_is_named(name: str, values: dict[str, str], status: str) -> None:
    check = check_of(name, FACTS, OTHER, THIRD | {name: values})
    assert check.status == status
    assert "rank 2: " in check.detail
    assert "rank 1: " not in check.detail
    others = [FACTS | {name: values, "place": {"host": f"node{n}", "gpu": ""}} for n in range(7)]
    assert check_of(name, FACTS, *others).detail.endswith("; and 3 more ranks")


def test_the_slowest_rank_sets_the_speed_and_slow_gpus_are_warned_about() -> None:
    times = [0.010, 0.025]
    assert "10.24 GB/s" in all_reduce_check(times, 256, gpus=True).detail
    slow = [0.2, 0.2]
    assert all_reduce_check(slow, 256, gpus=True).status == WARN
    assert all_reduce_check(slow, 256, gpus=False).status == OK
    four = [0.05] * 4
    assert "7.68 GB/s" in all_reduce_check(four, 256, gpus=True).detail
