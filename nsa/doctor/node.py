"""What has to be right about a machine before a run: versions, compiler, memory, disk, limits.

Each function judges facts that it is given; `nsa.doctor.command` gathers them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from nsa.doctor.check import FAIL, OK, SKIP, WARN, Check

MIB, GB = 2**20, 10**9

# Inclusive ranges of versions that compute something wrong.
_BROKEN_DEEPSPEED = (
    ("0.17.6", "0.18.2", "computes wrong ZeRO-2 gradients"),
    ("0.18.3", "0.19.3", "scales the loss wrongly where backward calls are mixed"),
)
_MIN_TORCH = "2.8"
_MIN_PYTHON = (3, 10)
_TRITON_OF_TORCH = {"2.13": "3.7.1"}  # for builds of torch that name none, those for the CPU

_LOGS = 2 * GB  # metrics, event files, heartbeats, traces and pictures of a long run
_MEMORY_PER_RANK = 2 * GB  # Python, torch, DeepSpeed and the loader's batches
_INODES = 10_000
_OPEN_FILES = 1_024
_SHM_NEEDED = 64 * MIB  # also what Docker gives; NCCL takes some 4 MiB a channel and peer
_SHM_ADVISED = 1_024 * MIB


def python_check(version: Sequence[int]) -> Check:
    """The interpreter's version."""
    detail = ".".join(map(str, version[:3]))
    if tuple(version[:2]) < _MIN_PYTHON:
        return Check("python", FAIL, f"{detail} is too old", "use Python 3.10 or newer")
    return Check("python", OK, detail)


def deepspeed_check(version: str | None) -> Check:
    """Versions of DeepSpeed that train, and get it wrong."""
    if version is None:
        return Check(
            "deepspeed", FAIL, "is not installed", "bash launch/setup.sh, or pip install deepspeed"
        )
    for first, last, what in _BROKEN_DEEPSPEED:
        # A local or development suffix (0.18.2+abc) is still that release.
        if Version(first) <= Version(Version(version).base_version) <= Version(last):
            fix = "pip install 'deepspeed>=0.19.4'"
            return Check("deepspeed", FAIL, f"{version} {what}", fix)
    if Version(version) < Version(_BROKEN_DEEPSPEED[0][0]):
        fix = "pip install 'deepspeed>=0.19.4'"
        return Check("deepspeed", WARN, f"{version} is older than what this was tested with", fix)
    return Check("deepspeed", OK, version)


def torch_check(version: str | None) -> Check:
    """Torch's own version; what it was built for is looked at beside the driver."""
    if version is None:
        return Check(
            "torch", FAIL, "is not installed", "bash launch/setup.sh, or pip install torch"
        )
    if Version(version) < Version(_MIN_TORCH):
        fix = f"pip install 'torch>={_MIN_TORCH}'"
        return Check("torch", FAIL, f"{version} is older than {_MIN_TORCH}", fix)
    return Check("torch", OK, version)


def triton_check(
    torch: str | None, triton: str | None, requirements: Sequence[str], gpus: int
) -> Check:
    """Kernels are compiled by the triton that torch was built beside, or may not be at all.

    `requirements`: what the installed torch says that it requires.
    """
    bad = FAIL if gpus else WARN
    if torch is None:
        return Check("triton", SKIP, "no torch to compare it with")
    wanted = _TRITON_OF_TORCH.get(".".join(Version(torch).base_version.split(".")[:2]))
    for requirement in requirements:
        pinned = re.match(r"(?:pytorch-)?triton\s*\(?==\s*([\w.+]+)", requirement)
        wanted = pinned[1] if pinned else wanted
    if triton is None:
        fix = f"pip install triton=={wanted}" if wanted else "pip install triton"
        return Check("triton", bad, "is not installed: kernels for GPUs need it", fix)
    if wanted is None:
        return Check("triton", OK, f"{triton}; torch {torch} asks for no particular one")
    if _same_release(triton, wanted):
        return Check("triton", OK, f"{triton}, the one that torch {torch} asks for")
    detail = f"{triton}, but torch {torch} asks for {wanted}: kernels may fail to compile"
    return Check("triton", bad, detail, f"pip install triton=={wanted}")


def _same_release(one: str, other: str) -> bool:
    try:
        return Version(one).base_version == Version(other).base_version
    except InvalidVersion:
        return one == other


def compiler_check(compiler: str | None, python_h: Path, gpus: int) -> Check:
    """Triton builds a small C program for each kernel's launcher, on the machine that runs it."""
    missing = []
    if compiler is None:
        missing.append("no C compiler")
    if not python_h.is_file():
        missing.append(f"no {python_h}")
    if not missing:
        return Check("compiler", OK, f"{compiler}, and Python.h")
    status, use = (FAIL, "kernels") if gpus else (WARN, "DeepSpeed's ops and torch.compile")
    detail = f"{' and '.join(missing)}, which {use} need"
    return Check("compiler", status, detail, "Debian, Ubuntu: apt install g++ python3-dev")


def shm_check(free: int | None, gpus: int, peer_access: bool) -> Check:
    """NCCL passes data through /dev/shm where GPUs cannot reach each other.

    `free`: bytes; None where there is no /dev/shm.
    """
    fix = "docker run --shm-size=8g (or --ipc=host); else mount -o remount,size=8G /dev/shm"
    needs = gpus > 1 and not peer_access
    if free is None:
        return Check("/dev/shm", FAIL if needs else WARN, "is not there", fix)
    detail = f"{free / MIB:,.0f} MiB free"
    if needs and free <= _SHM_NEEDED:
        detail += f": {gpus} GPUs without peer access pass all their data through it"
        return Check("/dev/shm", FAIL, detail, fix)
    if free < _SHM_ADVISED:
        return Check("/dev/shm", WARN, f"{detail}, less than the 1 GiB advised", fix)
    return Check("/dev/shm", OK, detail)


@dataclass(frozen=True)
class Disk:
    """The place that a run will write to."""

    folder: Path  # the nearest one that exists
    free: int  # bytes that this user may write
    inodes: int | None  # None where the file system has no fixed number
    error: str | None  # why nothing can be written there


def disk_checks(disk: Disk, checkpoint_bytes: int, checkpoints: int) -> list[Check]:
    """Whether everything that the run will keep fits, before it has trained for days."""
    choose = "choose another folder with --run-dir"
    if disk.error is not None:
        return [
            Check("run folder", FAIL, f"{disk.folder} cannot be written to: {disk.error}", choose)
        ]
    needed = checkpoint_bytes * checkpoints + _LOGS
    detail = (
        f"{disk.free / GB:,.1f} GB free in {disk.folder}; {checkpoints} "
        f"checkpoint{'' if checkpoints == 1 else 's'} of {checkpoint_bytes / GB:,.2f} GB "
        f"and logs take {needed / GB:,.1f} GB"
    )
    fix = f"free some, {choose}, or keep fewer: --set checkpoint.keep=3"
    status = FAIL if disk.free < needed else WARN if disk.free < 1.2 * needed else OK
    checks = [Check("run folder", OK, f"{disk.folder} can be written to")]
    checks.append(Check("disk", status, detail, "" if status == OK else fix))
    if disk.inodes is not None and disk.inodes < _INODES:
        detail = f"{disk.inodes:,} files more fit in {disk.folder}"
        checks.append(Check("inodes", WARN, detail, f"remove small files, or {choose}"))
    return checks


def memory_check(available: int, ranks: int, checkpoint_bytes: int) -> Check:
    """Memory of the machine or of its container; each rank reads its part of a checkpoint."""
    needed = ranks * _MEMORY_PER_RANK + checkpoint_bytes
    detail = f"{available / GB:,.1f} GB available, {ranks} rank{'' if ranks == 1 else 's'} "
    detail += f"may take {needed / GB:,.1f} GB"
    fix = "end other programs, or give the container more"
    if available < needed // 4:
        return Check("memory", FAIL, detail, fix)
    if available < needed:
        return Check("memory", WARN, detail, fix)
    return Check("memory", OK, detail)


def limits_checks(limits: Mapping[str, int | None], checkpoint_bytes: int) -> list[Check]:
    """`files` that may be open and bytes of one `file_size`; None: unlimited."""
    checks = []
    files = limits["files"]
    if files is not None and files < _OPEN_FILES:
        detail = f"{files} files may be open at once: shards of text and sockets need more"
        checks.append(Check("open files", WARN, detail, "ulimit -n 65536"))
    else:
        shown = "any number" if files is None else f"{files:,}"
        checks.append(Check("open files", OK, f"{shown} may be open at once"))
    size = limits["file_size"]
    if size is not None and size < checkpoint_bytes:
        detail = f"no file may exceed {size / GB:,.2f} GB: a checkpoint's may"
        checks.append(Check("file size", FAIL, detail, "ulimit -f unlimited"))
    return checks
