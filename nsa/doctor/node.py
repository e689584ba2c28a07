"""Node checks: versions, compiler, shared memory, disk and GPUs of one machine, before a run."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from nsa.doctor import gpus
from nsa.doctor.check import FAIL, OK, WARN, Check
from nsa.system import output_of, package_version

MIB, GB = 2**20, 10**9
_BAD_VERSIONS = (  # package, versions, status, problem
    ("torch", "<2.8", FAIL, "is older than 2.8"),
    ("deepspeed", ">=0.17.6,<=0.18.2", FAIL, "computes wrong ZeRO-2 gradients"),
    ("deepspeed", ">=0.18.3,<=0.19.3", FAIL, "scales the loss wrongly if backward calls are mixed"),
    ("deepspeed", "<0.17.6", WARN, "is older than 0.19.4"),  # only untested
)
_MINIMUM = {"torch": "2.8", "deepspeed": "0.19.4"}
_LOGS = 2 * GB  # metrics, event files, heartbeats, traces and plots of a long run
_SHM_NEEDED = 64 * MIB  # Docker's default; NCCL takes about 4 MiB per channel and peer
_SHM_ADVISED = 1_024 * MIB


def node_checks(
    run_dir: Path, *, checkpoint_bytes: int, checkpoints: int, ranks: int | None = None
) -> list[Check]:
    """Run all node checks; needs no process group.

    `checkpoints`: the number that the run keeps, of `checkpoint_bytes` each. `ranks`: on this
    machine; default one per GPU.
    """
    in_torch = gpus.torch_gpus()
    count = len(in_torch.uuids)
    query = ("nvidia-smi", f"--query-gpu={gpus.QUERY}", "--format=csv,noheader,nounits")
    listed = gpus.parse_gpus(output_of(*query))
    used = [gpu for gpu in listed if gpu.uuid in in_torch.uuids] or listed
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    shm_free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else None
    peer_access = all(in_torch.peers.values()) and not gpus.p2p_disabled(os.environ)
    checks = [
        *(version_check(package, package_version(package)) for package in _MINIMUM),
        compiler_check(compiler, Path(sysconfig.get_path("include")) / "Python.h", count),
        shm_check(shm_free, count, peer_access),
        disk_check(run_dir, checkpoint_bytes, checkpoints),
        *gpus.gpu_checks(used, in_torch, ranks or count),
    ]
    if count > 1:
        indices = {gpu.index for gpu in used}
        links = gpus.parse_topology(output_of("nvidia-smi", "topo", "-m"))
        links = {pair: link for pair, link in links.items() if indices.issuperset(pair)}
        checks.append(gpus.topology_check(links, in_torch.peers, in_torch.rocm))
    return checks


def checkpoint_bytes(parameters: int) -> int:
    """Return a checkpoint's largest size: fp32 weights and master weights, AdamW's two moments."""
    return 16 * parameters


def kept_checkpoints(steps: int, every: int, keep: int, done: int = 0) -> int:
    """Return how many checkpoints a run adds to its folder at most, resumed after `done` steps.

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


def compiler_check(compiler: str | None, python_h: Path, gpus: int) -> Check:
    """Require a C compiler and Python.h: Triton compiles a launcher for each kernel at run time."""
    missing = [] if compiler else ["a C compiler"]
    missing += [] if python_h.is_file() else [str(python_h)]
    if not missing:
        return Check("compiler", OK, f"{compiler}, and Python.h")
    status, user = (FAIL, "kernels") if gpus else (WARN, "DeepSpeed's ops and torch.compile")
    detail = f"missing: {' and '.join(missing)}; {user} need it"
    return Check("compiler", status, detail, "Debian, Ubuntu: apt install g++ python3-dev")


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
