"""What only all ranks together can see: their code, their clocks, and the link between them.

Nothing here waits for ever. Ranks meet on their processors (gloo), where a wait ends after
`PATIENCE`; what they do on their devices runs in a thread that is waited for a limited time. Ranks
tell each other what they found before anyone judges, so all return the same list and none raises
alone.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nsa.doctor.check import FAIL, OK, SKIP, WARN, Check
from nsa.doctor.nccl import PREFIX

if TYPE_CHECKING:
    import torch

PATIENCE = timedelta(minutes=5)  # for a rank that comes late to a meeting
_TIMED = 3  # all-reduces that are timed, after one that is verified
_SLOW = 2.0  # GB/s; PCIe 3.0 with detours makes more
_MAX_SKEW = 1.0  # seconds
_MB, _GB = 10**6, 10**9
_PACKAGES = ("torch", "deepspeed", "triton", "numpy")
_PATTERN = 251  # a prime: no power-of-two shift of the buffer looks like the buffer

MEND_LINK = (
    "NCCL_P2P_DISABLE=1 is the safe slow way past a broken link between GPUs; the cure is in the "
    "lines on topology, ACS and /dev/shm; NCCL_DEBUG=INFO says which way is taken"
)


@dataclass(frozen=True)
class Facts:
    """What one rank is, as the others get to know it."""

    host: str
    code: str  # fingerprint of the package
    config: str  # text of the configuration
    versions: Mapping[str, str]
    device: str  # model of the GPU, or cpu
    device_id: str  # no two ranks may share one; empty on the CPU
    nccl: Mapping[str, str]  # variables that are set
    checks: list[Check] = field(default_factory=list)  # of its machine


@dataclass(frozen=True)
class AllReduce:
    """What one rank saw of the all-reduce; `error` where there was no end or a wrong one."""

    seconds: float = 0.0
    error: str | None = None


def rank_checks(
    *,
    fingerprint: str,
    device: torch.device,
    config: str = "",
    machine: Sequence[Check] = (),
    megabytes: int | None = None,
    seconds: float = 120.0,
    clock: Callable[[], float] = time.time,
) -> list[Check]:
    """Compare all ranks and measure what is between them; a collective, the same list on each.

    `machine`: checks that this rank made of its machine, which become part of every rank's list.
    `megabytes`: of the all-reduce; by default 256 on GPUs and 4 elsewhere. `seconds`: how long
    that may take. Afterwards only the process group may be used whose all-reduce did not fail.
    """
    import torch.distributed as dist

    facts = _facts(fingerprint, config, device, machine)
    if dist.get_world_size() == 1:
        alone = "one rank alone: nothing to compare or to send"
        return [*_of_machines([facts]), Check("ranks", SKIP, alone)]
    if megabytes is None:
        megabytes = 4 if device.type == "cpu" else 256
    with _meeting() as group:
        everyone = _gather(facts, group)
        checks = [*_of_machines(everyone), *compare(everyone)]
        checks.append(skew_check(_skews(clock, group), [facts.host for facts in everyone]))
        if any(check.name == "devices" and check.status == FAIL for check in checks):
            return [*checks, Check("all-reduce", SKIP, "two ranks on one device would hang")]
        mine = _bounded(lambda: _all_reduce(device, megabytes * _MB), seconds)
        checks.append(all_reduce_check(_gather(mine, group), megabytes, device.type == "cuda"))
    return checks


def compare(everyone: Sequence[Facts]) -> list[Check]:
    """Hold every rank against rank 0: code, configuration, versions, devices, NCCL variables."""
    first = everyone[0]
    checks = [
        _same(
            "code",
            FAIL,
            [_other(facts.code, first.code) for facts in everyone],
            f"every rank has {first.code}",
            "bring every machine's checkout of this project to the same commit",
        ),
        _same(
            "config",
            FAIL,
            [_first_difference(facts.config, first.config) for facts in everyone],
            "the same on every rank",
            "start every node with the same flags and files",
        ),
        _same(
            "versions",
            FAIL,
            [_changed(facts.versions, first.versions) for facts in everyone],
            ", ".join(f"{name} {version}" for name, version in first.versions.items()),
            "install launch/constraints.txt on every machine",
        ),
        _same(
            "nccl on ranks",
            WARN,
            [_changed(facts.nccl, first.nccl) for facts in everyone],
            "the same variables on every rank",
            "set them on every machine, or on none",
        ),
        _devices(everyone),
    ]
    return checks


def skew_check(skews: Sequence[float], hosts: Sequence[str]) -> Check:
    """`skews`: seconds by which each rank's clock is ahead of rank 0's."""
    worst = max(range(len(skews)), key=lambda rank: abs(skews[rank]))
    if abs(skews[worst]) > _MAX_SKEW:
        detail = f"rank {worst} ({hosts[worst]}) is {skews[worst]:+.1f} s from rank 0: times in "
        detail += "heartbeats and logs cannot be compared"
        return Check("clocks", WARN, detail, "switch on chrony or ntpd on every machine")
    return Check("clocks", OK, f"within {abs(skews[worst]) * 1e3:.1f} ms of rank 0's")


def all_reduce_check(found: Sequence[AllReduce], megabytes: int, gpus: bool) -> Check:
    """The bandwidth that the slowest rank saw, as `nccl-tests` counts it ("bus bandwidth")."""
    wrong = [f"rank {rank}: {it.error}" for rank, it in enumerate(found) if it.error is not None]
    if wrong:
        return Check("all-reduce", FAIL, f"of {megabytes} MB: {'; '.join(wrong)}", MEND_LINK)
    ranks, slowest = len(found), max(it.seconds for it in found)
    speed = 2 * (ranks - 1) / ranks * megabytes * _MB / slowest / _GB
    detail = f"{megabytes} MB over {ranks} ranks in {slowest * 1e3:.1f} ms, {speed:.2f} GB/s"
    if gpus and speed < _SLOW:
        return Check("all-reduce", WARN, f"{detail}; PCIe 3.0 makes 5 and more", MEND_LINK)
    return Check("all-reduce", OK, detail)


def _facts(fingerprint: str, config: str, device: torch.device, machine: Sequence[Check]) -> Facts:
    import torch

    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    model, identity = device.type, ""
    if device.type == "cuda":
        try:
            properties = torch.cuda.get_device_properties(device)
            model, identity = properties.name, str(properties.uuid)
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        except (AssertionError, RuntimeError) as error:  # the others wait: told, not raised
            model = f"{device} that cannot be used: {error}"
    variables = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    return Facts(
        platform.node(), fingerprint, config, versions, model, identity, variables, list(machine)
    )


def _of_machines(everyone: Sequence[Facts]) -> list[Check]:
    """What ranks found on their machines, with the host's name where there are several."""
    several = len({facts.host for facts in everyone}) > 1
    return [
        Check(f"{check.name} ({facts.host})", check.status, check.detail, check.fix)
        if several
        else check
        for facts in everyone
        for check in facts.checks
    ]


@contextlib.contextmanager
def _meeting() -> Iterator[Any]:
    """A group of its own on the processors: it works whatever the devices do."""
    import torch.distributed as dist

    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _gather(mine: Any, group: Any) -> list[Any]:
    import torch.distributed as dist

    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _skews(clock: Callable[[], float], group: Any) -> list[float]:
    """Seconds by which each rank's clock is ahead of rank 0's, to half of the way there and back.

    Of three questions the one that was answered fastest counts.
    """
    import torch
    import torch.distributed as dist

    rank, skews = dist.get_rank(), [0.0]
    for other in range(1, dist.get_world_size()):
        answers = []
        for _ in range(3):
            told = torch.zeros((), dtype=torch.float64)
            if rank == 0:
                asked, before = time.monotonic(), clock()
                dist.send(told, other, group=group)
                dist.recv(told, other, group=group)
                way = time.monotonic() - asked
                answers.append((way, told.item() - before - way / 2))
            elif rank == other:
                dist.recv(told, 0, group=group)
                dist.send(told.fill_(clock()), 0, group=group)
        skews.append(min(answers)[1] if answers else 0.0)
    all_told = [skews]
    dist.broadcast_object_list(all_told, group=group)
    return all_told[0]


def _bounded(work: Callable[[], AllReduce], seconds: float) -> AllReduce:
    """Do `work` in a thread; what has not ended by then is left behind, and the run with it."""
    done: list[AllReduce] = []

    def do() -> None:
        try:
            done.append(work())
        except Exception as error:  # the others have to hear of it before this rank may end
            first_line = (str(error).splitlines() or [""])[0]
            done.append(AllReduce(error=f"{type(error).__name__}: {first_line}"))

    thread = threading.Thread(target=do, name="all-reduce check", daemon=True)
    thread.start()
    thread.join(seconds)
    return done[0] if done else AllReduce(error=f"had not ended after {seconds:g} s")


def _all_reduce(device: torch.device, size: int) -> AllReduce:
    """Sum a buffer of `size` bytes once to verify it, then some times to time it."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)  # a thread starts with device 0
    pattern = torch.arange(size // 4, device=device).remainder_(_PATTERN).float()
    buffer = pattern + dist.get_rank()
    dist.all_reduce(buffer)
    expected = pattern.mul_(ranks).add_(ranks * (ranks - 1) / 2)  # small integers: no rounding
    wrong = int((buffer != expected).sum())
    taken = []
    buffer.zero_()
    for _ in range(_TIMED):  # also where sums were wrong: the other ranks do it too
        if on_gpu:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        dist.all_reduce(buffer)
        if on_gpu:
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    error = f"{wrong:,} of {size // 4:,} sums are wrong" if wrong else None
    if on_gpu:  # a run's peak of memory is its own
        del pattern, buffer, expected
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return AllReduce(statistics.median(taken), error)


def _same(name: str, bad: str, differences: list[str], good: str, fix: str) -> Check:
    """`differences`: of each rank, empty where it is like rank 0."""
    unlike = [f"rank {rank}: {what}" for rank, what in enumerate(differences) if what]
    if not unlike:
        return Check(name, OK, good)
    more = f"; and {len(unlike) - 4} ranks more" if unlike[4:] else ""
    return Check(name, bad, f"differs from rank 0's on {'; '.join(unlike[:4])}{more}", fix)


def _other(value: str, first: str) -> str:
    return "" if value == first else f"{value} against {first}"


def _first_difference(text: str, first: str) -> str:
    """The first line in which two configurations differ."""
    ours, theirs = text.splitlines(), first.splitlines()
    for number in range(max(len(ours), len(theirs))):
        mine = ours[number].strip() if number < len(ours) else "nothing"
        other = theirs[number].strip() if number < len(theirs) else "nothing"
        if mine != other:
            return f"line {number + 1} is '{mine}' against '{other}'"
    return ""


def _changed(values: Mapping[str, str], first: Mapping[str, str]) -> str:
    """The entries of two mappings that differ."""
    return ", ".join(
        f"{name} {values.get(name, 'unset')} against {first.get(name, 'unset')}"
        for name in sorted({*values, *first})
        if values.get(name) != first.get(name)
    )


def _devices(everyone: Sequence[Facts]) -> Check:
    """A device for each rank, and the same model for all."""
    taken: dict[tuple[str, str], int] = {}
    for rank, facts in enumerate(everyone):
        if not facts.device_id:
            continue
        before = taken.setdefault((facts.host, facts.device_id), rank)
        if before != rank:
            detail = f"ranks {before} and {rank} share one GPU of {facts.host}"
            fix = "start no more ranks than GPUs: deepspeed --num_gpus N; look at "
            return Check("devices", FAIL, detail, fix + "CUDA_VISIBLE_DEVICES")
    models = [_other(facts.device, everyone[0].device) for facts in everyone]
    good = f"{len(everyone)} x {everyone[0].device}"
    fix = "every step waits for the slowest; name equal GPUs with --include"
    return _same("devices", WARN, models, good, fix)
