"""`nsa doctor`: is this machine fit for the run? One line a check, the fix below each failure.

Here the facts are gathered; `machine`, `gpus`, `nccl` and `ranks_check` judge them.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import os
import resource
import shutil
import socket
import sys
import sysconfig
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nsa.doctor import gpus, node
from nsa.doctor.check import FAIL, OK, SKIP, Check, failures, lines, verdict
from nsa.doctor.nccl import nccl_checks, peers_switched_off
from nsa.doctor.probes import free_bytes, iommu_groups, said_by, text_of
from nsa.doctor.ranks import rank_checks

__all__ = [
    "Check",
    "checkpoint_bytes",
    "code_fingerprint",
    "dry_batch_check",
    "failures",
    "kept_checkpoints",
    "lines",
    "node_checks",
    "rank_checks",
    "verdict",
]

_RANKS = "deepspeed --num_gpus 2 recipes/m7c.py --until preflight"
_M7C = 125_000_000  # parameters
_M7C_CHECKPOINTS = 10  # 50,000 steps, one every 5,000


def node_checks(
    run_dir: Path, *, checkpoint_bytes: int, checkpoints: int, ranks: int | None = None
) -> list[Check]:
    """Everything that one process can see of its machine; it needs no process group.

    `checkpoint_bytes` of each of `checkpoints` that the run keeps; `ranks` on this machine, by
    default one for each GPU, or 2. Programs that are asked (nvidia-smi, lspci) have 10 s each.
    """
    torch = _torch()
    count, ranks = len(torch.uuids), ranks or len(torch.uuids) or 2
    found = gpus.parse_gpus(_nvidia_smi(f"--query-gpu={','.join(gpus.QUERY)}"))
    found = [gpu for gpu in found if gpu.uuid in torch.uuids] or found
    links = gpus.parse_topology(said_by("nvidia-smi", "topo", "-m")) if count > 1 else {}
    used = {gpu.index for gpu in found}
    links = {pair: link for pair, link in links.items() if used.issuperset(pair)}
    lspci = said_by("lspci", "-vvv") if count > 1 else ""
    installed = {name: _version(name) for name in ("torch", "triton", "deepspeed")}
    requirements = importlib.metadata.requires("torch") or [] if installed["torch"] else []
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    python_h = Path(sysconfig.get_path("include")) / "Python.h"
    peer_access = all(torch.peers.values()) and not peers_switched_off(os.environ)
    return [
        node.python_check(sys.version_info[:3]),
        torch.broken or node.torch_check(installed["torch"]),
        node.deepspeed_check(installed["deepspeed"]),
        node.triton_check(installed["torch"], installed["triton"], requirements, count),
        node.compiler_check(compiler, python_h, count),
        node.memory_check(_available_memory(), ranks, checkpoint_bytes),
        node.shm_check(free_bytes(Path("/dev/shm")), count, peer_access),
        *node.disk_checks(_disk(run_dir), checkpoint_bytes, checkpoints),
        *node.limits_checks(_limits(), checkpoint_bytes),
        *gpus.gpu_checks(found, count, torch.built_for, ranks),
        gpus.peer_check(torch.peers, count),
        gpus.topology_check(links, count),
        gpus.acs_check(lspci or None, iommu_groups(), text_of(Path("/proc/cmdline")), count),
        *nccl_checks(os.environ, [name for _, name in socket.if_nameindex()]),
    ]


def code_fingerprint(root: Path | None = None) -> str:
    """A short hash of the package's sources: equal on two machines means the same code."""
    root = root or Path(__file__).parents[1]
    digest = hashlib.sha256()
    for source in sorted(root.rglob("*.py")):
        content = source.read_bytes()
        digest.update(f"{source.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def checkpoint_bytes(parameters: int) -> int:
    """What one checkpoint takes at most: weights, master weights and AdamW's two moments."""
    return 16 * parameters


def kept_checkpoints(steps: int, every: int, keep: int, done: int = 0) -> int:
    """How many a run will yet write and hold at once; `done`: steps before it was resumed.

    Of those that are kept one more lies on the disk while the newest is written.
    """
    written = -(-(steps - done) // every) if every else 1
    return max(1, min(written, keep + 1) if keep else written)


def dry_batch_check(detail: str, error: BaseException | None = None) -> Check:
    """What became of one batch taken through the whole model before training."""
    if error is None:
        return Check("dry batch", OK, detail)
    first_line = (str(error).splitlines() or [""])[0]
    fix = ""
    if type(error).__name__ == "OutOfMemoryError":
        fix = (
            "--set train.micro_batch=1 with a larger train.accumulation, or --set "
            "model.activation_checkpointing=non_reentrant"
        )
    return Check("dry batch", FAIL, f"{detail}: {type(error).__name__}: {first_line}", fix)


def add_parser(verbs: Any) -> None:
    """Add `doctor` to the verbs of `nsa`."""
    about = "say what is wrong with this machine before a run finds out"
    doctor = verbs.add_parser("doctor", help=about, description=about)
    doctor.add_argument(
        "--run-dir", type=Path, default=Path("runs"), help="where runs go (default: runs)"
    )
    doctor.add_argument(
        "--parameters", type=int, default=_M7C, help=f"of the model (default {_M7C:,}, M7C)"
    )
    doctor.add_argument(
        "--checkpoints",
        type=int,
        default=_M7C_CHECKPOINTS,
        help=f"that the run keeps (default {_M7C_CHECKPOINTS})",
    )
    doctor.add_argument(
        "--ranks", type=int, help="on this machine (default: one for each GPU, or 2 without any)"
    )
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    for name in ("parameters", "checkpoints", "ranks"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: must be 1 or more")
    checks = node_checks(
        args.run_dir.expanduser(),
        checkpoint_bytes=checkpoint_bytes(args.parameters),
        checkpoints=args.checkpoints,
        ranks=args.ranks,
    )
    checks.append(Check("ranks", SKIP, f"code, clocks and all-reduce: {_RANKS}"))
    if args.json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        print(*lines(checks), sep="\n")
    return 0 if verdict(checks) else 2


@dataclass(frozen=True)
class _Torch:
    """What torch says of the GPUs; of those alone that it may use."""

    uuids: list[str] = field(default_factory=list)
    built_for: str | None = None  # version of CUDA
    peers: dict[tuple[int, int], bool] = field(default_factory=dict)  # who reads whose memory
    broken: Check | None = None  # why it says nothing


def _torch() -> _Torch:
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
        peers = {
            pair: torch.cuda.can_device_access_peer(*pair)
            for pair in itertools.permutations(range(count), 2)
        }
        return _Torch(uuids, torch.version.cuda, peers)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            return _Torch()  # the check of its version says so
        problem: Exception = error
    except (ImportError, OSError, RuntimeError) as error:
        problem = error
    first_line = (str(problem).splitlines() or [type(problem).__name__])[0]
    return _Torch(broken=Check("torch", FAIL, f"fails: {first_line}", "bash launch/setup.sh"))


def _nvidia_smi(query: str) -> str:
    return said_by("nvidia-smi", query, "--format=csv,noheader,nounits")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _disk(run_dir: Path) -> node.Disk:
    """The folder that exists nearest to `run_dir`, tried by a file that vanishes again."""
    folder = run_dir.absolute()
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0" * 4_096)
            probe.flush()
        stat = os.statvfs(folder)
    except OSError as failed:
        return node.Disk(folder, 0, None, failed.strerror or str(failed))
    inodes = stat.f_favail if stat.f_files else None
    return node.Disk(folder, stat.f_bavail * stat.f_frsize, inodes, None)


def _limits() -> dict[str, int | None]:
    """The soft limits of this process, which its ranks inherit."""
    limits = {"files": resource.RLIMIT_NOFILE, "file_size": resource.RLIMIT_FSIZE}
    found = {name: resource.getrlimit(kind)[0] for name, kind in limits.items()}
    return {name: None if soft == resource.RLIM_INFINITY else soft for name, soft in found.items()}


def _available_memory() -> int:
    """Of the machine, or of its container where that has less."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit, used = (text_of(Path(f"/sys/fs/cgroup/memory.{what}")) for what in ("max", "current"))
    if limit.strip().isdigit() and used.strip().isdigit():
        available = min(available, int(limit) - int(used))
    return available
