"""Node checks: versions, compiler, shared memory, disk and GPUs of one machine, before a run."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shutil
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from nsa.system import output_of, package_version
from nsa.text import first_line

OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"
MIB, GB = 2**20, 10**9
# Older DeepSpeed has wrong ZeRO-2 gradients, or a wrong loss scale.
_MINIMUM = {"torch": "2.8", "deepspeed": "0.19.4"}
_BYTES_PER_PARAMETER = 16  # of a checkpoint at most: fp32 weights, master weights, two moments
_LOG_BYTES = 2 * GB  # metrics, event files, heartbeats, traces and plots of a long run
_SHM_NEEDED = 64 * MIB  # Docker's default; NCCL takes about 4 MiB per channel and peer
_SHM_ADVISED = 1_024 * MIB
_DISPLAY_MIB = 2_000  # GPU memory that a display uses at most


@dataclass(frozen=True)
class Check:
    name: str
    status: str  # ok, warn, fail or skip
    detail: str
    fix: str = ""


def lines(checks: Sequence[Check]) -> list[str]:
    """Return an aligned line per check, with the fix below each warning and failure."""
    width = max((len(check.name) for check in checks), default=0)
    texts = []
    for check in checks:
        texts.append(f"{check.status:<5}{check.name:<{width}}  {check.detail}")
        if check.fix and check.status in (WARN, FAIL):
            texts.append(f"{'':5}{'':{width}}  -> {check.fix}")
    return texts


def passed(checks: Sequence[Check]) -> bool:
    """Return whether a run may start; warnings do not prevent it."""
    return all(check.status != FAIL for check in checks)


def failures(checks: Sequence[Check]) -> str:
    """Return all failures with their fixes in one line, for an error message."""
    return "; ".join(
        f"{check.name}: {check.detail}{f' ({check.fix})' if check.fix else ''}"
        for check in checks
        if check.status == FAIL
    )


def node_checks(
    run_dir: Path, *, parameters: int, checkpoints: int, ranks: int | None = None
) -> list[Check]:
    """Run all node checks; needs no process group.

    The run keeps `checkpoints` checkpoints of a model with `parameters` parameters, and starts
    `ranks` ranks on this machine, by default one per GPU.
    """
    gpus = torch_gpus()
    count = len(gpus.used_mib)
    listed = len(re.findall("^GPU ", output_of("nvidia-smi", "-L"), re.M))
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    shm_free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else None
    peer_access = all(gpus.peers.values()) and not p2p_disabled(os.environ)
    checks = [
        *(version_check(package, package_version(package)) for package in _MINIMUM),
        compiler_check(compiler, Path(sysconfig.get_path("include")) / "Python.h", count),
        shm_check(shm_free, count, peer_access),
        disk_check(run_dir, _BYTES_PER_PARAMETER * parameters, checkpoints),
        *gpu_checks(listed, gpus, ranks or count),
    ]
    if count > 1:
        checks.append(peer_check(gpus.peers))
    return checks


def kept_checkpoints(steps: int, every: int, keep: int, done: int = 0) -> int:
    """Return the most checkpoints that a run adds to its folder if it resumes after `done` steps.

    While it writes the newest, `keep` older ones still exist.
    """
    written = math.ceil((steps - done) / every) if every else 1
    if keep:
        written = min(written, keep + 1)
    return max(1, written)


def version_check(package: str, version: str | None) -> Check:
    """Fail on a version of torch or DeepSpeed that is missing or too old."""
    if version is None:
        return Check(package, FAIL, "is not installed", "bash launch/setup.sh")
    minimum = _MINIMUM[package]
    release = Version(version).base_version  # NVIDIA's 2.8.0a0+… counts as 2.8.0
    if Version(release) < Version(minimum):
        fix = f"pip install '{package}>={minimum}'"
        return Check(package, FAIL, f"{version} is older than {minimum}", fix)
    return Check(package, OK, version)


def compiler_check(compiler: str | None, python_h: Path, gpus: int) -> Check:
    """Require a C compiler and Python.h: Triton compiles a launcher for each kernel at run time."""
    missing = []
    if not compiler:
        missing.append("a C compiler")
    if not python_h.is_file():
        missing.append(str(python_h))
    if not missing:
        return Check("compiler", OK, f"{compiler}, and Python.h")
    status, users = (FAIL, "kernels") if gpus else (WARN, "DeepSpeed's ops and torch.compile")
    detail = f"missing: {' and '.join(missing)}; {users} need it"
    return Check("compiler", status, detail, "Debian, Ubuntu: apt install g++ python3-dev")


def shm_check(free: int | None, gpus: int, peer_access: bool) -> Check:
    """Check /dev/shm, which GPUs without peer access use; `free`: bytes, None: it is missing."""
    fix = "docker run --shm-size=8g (or --ipc=host); else mount -o remount,size=8G /dev/shm"
    needed = gpus > 1 and not peer_access
    if free is None:
        return Check("/dev/shm", FAIL if needed else WARN, "does not exist", fix)
    detail = f"{free / MIB:,.0f} MiB free"
    if needed and free <= _SHM_NEEDED:
        detail += f": {gpus} GPUs without peer access send all their data through it"
        return Check("/dev/shm", FAIL, detail, fix)
    if free < _SHM_ADVISED:
        return Check("/dev/shm", WARN, f"{detail}, less than the recommended 1 GiB", fix)
    return Check("/dev/shm", OK, detail)


def disk_check(run_dir: Path, checkpoint_bytes: int, checkpoints: int) -> Check:
    """Check that `run_dir` is writable, and that the run's checkpoints and logs fit."""
    folder = run_dir.absolute()
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0" * 4_096)
            probe.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        detail = f"{folder} cannot be written to: {error.strerror or error}"
        return Check("disk", FAIL, detail, "choose another folder with --run-dir")
    needed = checkpoint_bytes * checkpoints + _LOG_BYTES
    plural = "" if checkpoints == 1 else "s"
    detail = (
        f"{free / GB:,.1f} GB free in {folder}; {checkpoints} checkpoint{plural} of "
        f"{checkpoint_bytes / GB:,.2f} GB and logs take {needed / GB:,.1f} GB"
    )
    fix = "free space, choose another folder with --run-dir, or --set checkpoint.keep=3"
    if free < needed:
        return Check("disk", FAIL, detail, fix)
    if free < 1.2 * needed:
        return Check("disk", WARN, detail, fix)
    return Check("disk", OK, detail)


@dataclass(frozen=True)
class Gpus:
    """The GPUs that torch can use."""

    used_mib: list[int] = field(default_factory=list)  # memory in use on each GPU
    peers: dict[tuple[int, int], bool] = field(default_factory=dict)  # (a, b): a can read b
    problem: str = "it is a CPU build"  # the reason, if torch can use no GPU


def torch_gpus() -> Gpus:
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        pairs = itertools.permutations(range(count), 2)
        peers = {pair: torch.cuda.can_device_access_peer(*pair) for pair in pairs}
        used_mib = [0] * count
        with contextlib.suppress(Exception):  # the package of NVML or amdsmi may be missing
            used_mib = [torch.cuda.device_memory_used(index) // MIB for index in range(count)]
        return Gpus(used_mib, peers)
    if torch.version.cuda or torch.version.hip:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:  # such as a driver that is too old
            return Gpus(problem=first_line(error))
    return Gpus()


def gpu_checks(listed: int, gpus: Gpus, ranks: int) -> list[Check]:
    """Compare the GPUs that torch sees with the number of ranks; nvidia-smi sees `listed`."""
    visible = len(gpus.used_mib)
    if not listed and not visible:
        return [Check("gpus", SKIP, "no GPU here")]
    status, detail, fix = OK, f"torch sees {visible}", ""
    if not visible:
        status, detail = FAIL, f"{detail} of {listed}: {gpus.problem}"
        fix = "check CUDA_VISIBLE_DEVICES; install a torch build for this driver: pytorch.org"
    elif visible < ranks:
        status, detail = FAIL, f"{detail}, fewer than the {ranks} ranks"
        fix = f"start {visible}: deepspeed --num_gpus {visible}; or check CUDA_VISIBLE_DEVICES"
    checks = [Check("gpus", status, detail, fix)]
    used = enumerate(gpus.used_mib)
    if busy := [f"GPU {index}: {mib:,} MiB" for index, mib in used if mib > _DISPLAY_MIB]:
        fix = "find the process with nvidia-smi; end a leftover rank by its process id"
        checks.append(Check("gpu in use", WARN, "; ".join(busy), fix))
    return checks


def peer_check(peers: Mapping[tuple[int, int], bool]) -> Check:
    """Warn about each pair (a, b) of GPUs of which a cannot read b."""
    missing = [f"{first}->{second}" for (first, second), access in peers.items() if not access]
    if not missing:
        return Check("peer access", OK, "between all GPUs")
    pairs = ", ".join(missing[:4]) + (" and more" if missing[4:] else "")
    detail = f"none {pairs}: data goes through /dev/shm, at about half the speed"
    fix = "normal on some boards and in virtual machines; else check the BIOS and iommu=pt"
    return Check("peer access", WARN, detail, fix)


def p2p_disabled(variables: Mapping[str, str]) -> bool:
    """Return whether NCCL's environment variables disable peer access between GPUs."""
    level = variables.get("NCCL_P2P_LEVEL", "").upper()
    return variables.get("NCCL_P2P_DISABLE") == "1" or level in ("LOC", "0")
