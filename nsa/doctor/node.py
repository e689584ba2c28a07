"""Node checks: versions, compiler, memory, disk, limits and GPUs of one machine, before a run."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import shutil
import socket
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from nsa.doctor import gpus
from nsa.doctor.check import FAIL, OK, SKIP, WARN, Check
from nsa.doctor.nccl import nccl_checks, p2p_disabled
from nsa.probes import (
    available_memory,
    free_bytes,
    iommu_groups,
    output_of,
    package_version,
    text_of,
)

MIB, GB = 2**20, 10**9
_BAD_VERSIONS = (  # package, versions, status, problem
    ("torch", "<2.8", FAIL, "is older than 2.8"),
    ("deepspeed", ">=0.17.6,<=0.18.2", FAIL, "computes wrong ZeRO-2 gradients"),
    ("deepspeed", ">=0.18.3,<=0.19.3", FAIL, "scales the loss wrongly if backward calls are mixed"),
    ("deepspeed", "<0.17.6", WARN, "is older than 0.19.4"),  # only untested
)
_MINIMUM = {"torch": "2.8", "deepspeed": "0.19.4"}
_TRITON_OF_TORCH = {"2.13": "3.7.1"}  # for CPU builds of torch, which require none
_LOGS = 2 * GB  # metrics, event files, heartbeats, traces and plots of a long run
_MEMORY_PER_RANK = 2 * GB  # Python, torch, DeepSpeed and prefetched batches
_OPEN_FILES = 1_024  # dataset shards and sockets
_SHM_NEEDED = 64 * MIB  # Docker's default; NCCL takes about 4 MiB per channel and peer
_SHM_ADVISED = 1_024 * MIB


def node_checks(
    run_dir: Path, *, checkpoint_bytes: int, checkpoints: int, ranks: int | None = None
) -> list[Check]:
    """Run all node checks; needs no process group.

    `checkpoints`: the number that the run keeps, of `checkpoint_bytes` each. `ranks`: on this
    machine; default one per GPU, or 2.
    """
    torch = gpus.torch_gpus()
    count = len(torch.uuids)
    ranks = ranks or count or 2
    query = f"--query-gpu={','.join(gpus.QUERY)}"
    listed = gpus.parse_gpus(output_of("nvidia-smi", query, "--format=csv,noheader,nounits"))
    used = [gpu for gpu in listed if gpu.uuid in torch.uuids] or listed
    indices = {gpu.index for gpu in used}
    links = gpus.parse_topology(output_of("nvidia-smi", "topo", "-m")) if count > 1 else {}
    links = {pair: link for pair, link in links.items() if indices.issuperset(pair)}
    lspci = output_of("lspci", "-vvv") if count > 1 else ""
    version = package_version("torch")
    required = importlib.metadata.requires("torch") or [] if version else []
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    peer_access = all(torch.peers.values()) and not p2p_disabled(os.environ)
    return [
        torch.broken or version_check("torch", version),
        version_check("deepspeed", package_version("deepspeed")),
        triton_check(version, package_version("triton"), required, count),
        compiler_check(compiler, Path(sysconfig.get_path("include")) / "Python.h", count),
        memory_check(available_memory(), ranks, checkpoint_bytes),
        ulimit_check(checkpoint_bytes),
        shm_check(free_bytes("/dev/shm"), count, peer_access),
        disk_check(run_dir, checkpoint_bytes, checkpoints),
        *gpus.gpu_checks(used, torch, ranks),
        gpus.topology_check(links, count, torch.peers),
        gpus.acs_check(lspci, iommu_groups(), text_of("/proc/cmdline"), count),
        *nccl_checks(os.environ, [name for _, name in socket.if_nameindex()]),
    ]


def checkpoint_bytes(parameters: int) -> int:
    """Return the largest size of a checkpoint: weights, master weights, AdamW's two moments."""
    return 16 * parameters


def kept_checkpoints(steps: int, every: int, keep: int, done: int = 0) -> int:
    """Return the most checkpoints that a run adds to its folder, resumed after `done` steps.

    `keep` + 1 of them exist while the newest is written.
    """
    written = -(-(steps - done) // every) if every else 1
    return max(1, min(written, keep + 1) if keep else written)


def version_check(package: str, version: str | None) -> Check:
    """Fail on a version of torch or DeepSpeed that is missing, too old or known to be wrong."""
    if version is None:
        return Check(package, FAIL, "is not installed", "bash launch/setup.sh")
    release = Version(version).base_version  # 0.18.2+abc is still that release
    for name, versions, status, problem in _BAD_VERSIONS:
        if name == package and release in SpecifierSet(versions):
            fix = f"pip install '{package}>={_MINIMUM[package]}'"
            return Check(package, status, f"{version} {problem}", fix)
    return Check(package, OK, version)


def triton_check(
    torch: str | None, triton: str | None, requirements: Sequence[str], gpus: int
) -> Check:
    """Compare triton with the version that torch's `requirements` pin."""
    if torch is None:
        return Check("triton", SKIP, "no torch to compare with")
    pattern = r"(?:pytorch-)?triton\s*\(?==\s*([\w.+]+)"
    pins = (pin[1] for text in requirements if (pin := re.match(pattern, text)))
    release = ".".join(Version(torch).base_version.split(".")[:2])
    required = next(pins, _TRITON_OF_TORCH.get(release))
    bad, fix = FAIL if gpus else WARN, f"pip install triton{f'=={required}' if required else ''}"
    if triton is None:
        return Check("triton", bad, "is not installed: GPU kernels need it", fix)
    if required is None or Version(triton).base_version == Version(required).base_version:
        return Check("triton", OK, triton)
    detail = f"{triton}, but torch {torch} requires {required}: kernels may fail to compile"
    return Check("triton", bad, detail, fix)


def compiler_check(compiler: str | None, python_h: Path, gpus: int) -> Check:
    """Require a C compiler and Python.h: Triton compiles a launcher for each kernel at run time."""
    missing = [] if compiler else ["a C compiler"]
    missing += [] if python_h.is_file() else [str(python_h)]
    if not missing:
        return Check("compiler", OK, f"{compiler}, and Python.h")
    status, user = (FAIL, "kernels") if gpus else (WARN, "DeepSpeed's ops and torch.compile")
    detail = f"missing: {' and '.join(missing)}; {user} need it"
    return Check("compiler", status, detail, "Debian, Ubuntu: apt install g++ python3-dev")


def memory_check(available: int, ranks: int, checkpoint_bytes: int) -> Check:
    """Check that the ranks fit, with one checkpoint, which they read when they resume."""
    needed = ranks * _MEMORY_PER_RANK + checkpoint_bytes
    status = FAIL if available < needed // 4 else WARN if available < needed else OK
    detail = f"{available / GB:,.1f} GB available; ranks and a checkpoint may take "
    fix = "end other programs, or raise the container's limit"
    return Check("memory", status, f"{detail}{needed / GB:,.1f} GB", "" if status == OK else fix)


def ulimit_check(checkpoint_bytes: int) -> Check:
    """Check the limits on open files and on the size of a file; -1: no limit."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if 0 <= size < checkpoint_bytes:
        detail = f"{size / GB:,.2f} GB per file: a checkpoint may not fit"
        return Check("ulimit", FAIL, detail, "ulimit -f unlimited")
    if 0 <= files < _OPEN_FILES:
        detail = f"{files} open files: prepared data and sockets may need more"
        return Check("ulimit", WARN, detail, "ulimit -n 65536")
    return Check("ulimit", OK, f"{'any number of' if files < 0 else files} open files")


def shm_check(free: int | None, gpus: int, peer_access: bool) -> Check:
    """Check /dev/shm, which carries the data of GPUs without peer access; `free` None: missing."""
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
    needed = checkpoint_bytes * checkpoints + _LOGS
    plural = "" if checkpoints == 1 else "s"
    detail = (
        f"{free / GB:,.1f} GB free in {folder}; {checkpoints} checkpoint{plural} of "
        f"{checkpoint_bytes / GB:,.2f} GB and logs take {needed / GB:,.1f} GB"
    )
    status = FAIL if free < needed else WARN if free < 1.2 * needed else OK
    fix = "free space, choose another folder with --run-dir, or --set checkpoint.keep=3"
    return Check("disk", status, detail, "" if status == OK else fix)
