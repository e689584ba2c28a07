"""Rank checks: same code, config, versions and GPUs on all ranks, and a verified all-reduce.

The all-reduce runs in a thread with a time limit. All ranks return the same list, so none raises
alone.
"""

from __future__ import annotations

import hashlib
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.doctor.node import FAIL, OK, SKIP, WARN, Check
from nsa.system import package_version, with_timeout
from nsa.text import first_line

if TYPE_CHECKING:
    import torch

LIMIT_SECONDS = 120.0  # to verify and time the all-reduce
_TIMED_ROUNDS = 3  # all-reduces to time, after one to verify
_SLOW = 2.0  # GB/s; even PCIe 3.0 through the CPU is faster
_MB, _GB = 10**6, 10**9
_PACKAGES = ("torch", "deepspeed", "triton", "numpy")
_PATTERN = 251  # period of the values; a prime, so that a shifted buffer has wrong sums
_COMPARED = {  # check name: (status if ranks differ, fix)
    "code": (FAIL, "check out the same commit on every machine"),
    "config": (FAIL, "start every node with the same flags and files"),
    "versions": (FAIL, "install launch/constraints.txt on every machine"),
    "devices": (WARN, "each step waits for the slowest; use equal GPUs with --include"),
}
_LINK_FIX = (
    "NCCL_P2P_DISABLE=1 avoids a broken link between GPUs, but is slower; for the cause see "
    "peer access and /dev/shm above; NCCL_DEBUG=INFO logs the path"
)


# What a rank reports, by check: the values to compare, by name. "place" is not compared: it has the
# rank's "host" and the UUID of its "gpu", which is "" on the CPU.
Facts = dict[str, dict[str, str]]


def rank_checks(
    *,
    device: torch.device,
    gather: Callable[[Any, Any], list[Any]],
    config: str = "",
    node_checks: Sequence[Check] = (),
) -> list[Check]:
    """Compare all ranks and time an all-reduce; returns the same list on each rank.

    `gather` takes a value and its type, and returns every rank's value on every rank, even if a GPU
    hangs. The returned list includes the `node_checks` of all ranks. After a failed all-reduce the
    default process group must not be used.
    """
    on_gpu = device.type == "cuda"
    megabytes = 256 if on_gpu else 4
    ranks: list[Facts] = gather(_facts(config, device), Facts)
    if len(ranks) == 1:
        return [*node_checks, Check("ranks", SKIP, "one rank: nothing to compare")]
    if len({facts["place"]["host"] for facts in ranks}) > 1:
        host = platform.node()
        node_checks = [replace(check, name=f"{check.name} ({host})") for check in node_checks]
    by_rank = gather(list(node_checks), list[Check])
    checks = [check for of_rank in by_rank for check in of_rank] + compare(ranks)
    if any(check.name == "devices" and check.status == FAIL for check in checks):
        return [*checks, Check("all-reduce", SKIP, "two ranks on one device would hang")]
    result: float | str
    try:
        result = with_timeout(LIMIT_SECONDS, lambda: _all_reduce(device, megabytes * _MB))
    except TimeoutError:
        result = f"did not end within {LIMIT_SECONDS:g} s"
    except Exception as error:  # the other ranks wait for the result
        result = f"{type(error).__name__}: {first_line(error)}"
    return [*checks, all_reduce_check(gather(result, float | str), megabytes, on_gpu)]


def code_fingerprint(root: Path | None = None) -> str:
    """Return a short hash of the package's sources."""
    root = root or Path(__file__).parents[1]
    digest = hashlib.sha256()
    for source in sorted(root.rglob("*.py")):
        content = source.read_bytes()
        digest.update(f"{source.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def compare(ranks: Sequence[Facts]) -> list[Check]:
    """Compare every rank with rank 0; fail if two ranks use the same GPU."""
    checks = []
    for name, (status, fix) in _COMPARED.items():
        first = ranks[0][name]
        differences = [_difference(facts[name], first) for facts in ranks]
        if different := [f"rank {rank}: {text}" for rank, text in enumerate(differences) if text]:
            more = f"; and {len(different) - 4} more ranks" if different[4:] else ""
            detail = f"differs from rank 0: {'; '.join(different[:4])}{more}"
            checks.append(Check(name, status, detail, fix))
        elif name == "config":
            checks.append(Check(name, OK, "the same on every rank"))
        else:
            values = ", ".join(f"{key} {value}".strip() for key, value in first.items())
            checks.append(Check(name, OK, f"{len(ranks)} x {values}"))
    gpus: dict[tuple[str, str], int] = {}
    for rank, facts in enumerate(ranks):
        host, gpu = facts["place"]["host"], facts["place"]["gpu"]
        other = gpus.setdefault((host, gpu), rank)
        if gpu and other != rank:
            detail = f"ranks {other} and {rank} share one GPU of {host}"
            fix = "start one rank per GPU (deepspeed --num_gpus N), or check CUDA_VISIBLE_DEVICES"
            checks = [check for check in checks if check.name != "devices"]
            checks.append(Check("devices", FAIL, detail, fix))
    return checks


def all_reduce_check(results: Sequence[float | str], megabytes: int, gpus: bool) -> Check:
    """Report the slowest rank's bandwidth, as nccl-tests defines bus bandwidth.

    `results`: each rank's seconds, or what failed.
    """
    errors = [f"rank {n}: {result}" for n, result in enumerate(results) if isinstance(result, str)]
    if errors:
        return Check("all-reduce", FAIL, f"of {megabytes} MB: {'; '.join(errors)}", _LINK_FIX)
    ranks, slowest = len(results), max(map(float, results))
    speed = 2 * (ranks - 1) / ranks * megabytes * _MB / slowest / _GB
    detail = f"{megabytes} MB over {ranks} ranks in {slowest * 1e3:.1f} ms, {speed:.2f} GB/s"
    if gpus and speed < _SLOW:
        return Check("all-reduce", WARN, f"{detail}; PCIe 3.0 reaches 5 or more", _LINK_FIX)
    return Check("all-reduce", OK, detail)


def _facts(config: str, device: torch.device) -> Facts:
    import torch

    versions = {"python": platform.python_version()}
    versions |= {name: version for name in _PACKAGES if (version := package_version(name))}
    model, gpu = device.type, ""
    if device.type == "cuda":
        try:
            properties = torch.cuda.get_device_properties(device)
            model, gpu = properties.name, str(properties.uuid)
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        except (AssertionError, RuntimeError) as error:  # the other ranks wait for the facts
            model = f"{device} that cannot be used: {first_line(error)}"
    return {
        "code": {"": code_fingerprint()},
        "config": {f"line {n}": line.strip() for n, line in enumerate(config.splitlines(), 1)},
        "versions": versions,
        "devices": {"": model},
        "place": {"host": platform.node(), "gpu": gpu},
    }


def _difference(values: Mapping[str, str], first: Mapping[str, str]) -> str:
    """Return the first three entries that differ."""
    different = [
        f"{name} '{values.get(name, '')}', not '{first.get(name, '')}'".strip()
        for name in dict.fromkeys([*first, *values])
        if values.get(name) != first.get(name)
    ]
    return ", ".join(different[:3])


def _all_reduce(device: torch.device, size: int) -> float | str:
    """All-reduce `size` bytes once to verify the sums, then a few times to time it."""
    import torch
    import torch.distributed as dist

    ranks, on_gpu = dist.get_world_size(), device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)  # a new thread starts with device 0
    pattern = torch.arange(size // 4, device=device).remainder_(_PATTERN).float()
    buffer = pattern + dist.get_rank()
    dist.all_reduce(buffer)
    expected = pattern.mul_(ranks).add_(ranks * (ranks - 1) / 2)  # small integers: exact
    wrong = int((buffer != expected).sum())
    seconds = []
    buffer.zero_()
    for _ in range(_TIMED_ROUNDS):  # even after wrong sums: the other ranks are waiting
        start = time.perf_counter()
        dist.all_reduce(buffer)
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    if on_gpu:  # keep this out of the run's peak memory
        del pattern, buffer, expected
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return f"{wrong:,} of {size // 4:,} sums are wrong" if wrong else statistics.median(seconds)
