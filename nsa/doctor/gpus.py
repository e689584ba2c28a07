"""GPU checks: visible and free; links and peer access between them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nsa.doctor.check import FAIL, OK, SKIP, WARN, Check
from nsa.text import first_line

_USED_MIB = 2_000  # more than a display takes
QUERY = "index,uuid,memory.used"


@dataclass(frozen=True)
class Gpu:
    """A row of `nvidia-smi --query-gpu`."""

    index: int
    uuid: str  # without the prefix "GPU-", as in torch
    used_mib: int


@dataclass(frozen=True)
class TorchGpus:
    """The GPUs that torch can use, or why it uses none."""

    uuids: list[str] = field(default_factory=list)
    peers: dict[tuple[int, int], bool] = field(default_factory=dict)  # pair: has peer access
    problem: str = "it is a CPU build"  # why torch uses no GPU
    rocm: str | None = None  # the version of a ROCm build, whose GPUs are AMD's


def torch_gpus() -> TorchGpus:
    import torch

    problem = TorchGpus.problem
    if (torch.version.cuda or torch.version.hip) and not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:  # names a driver that is too old
            problem = first_line(error)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
    pairs = itertools.permutations(range(count), 2)
    peers = {pair: torch.cuda.can_device_access_peer(*pair) for pair in pairs}
    return TorchGpus(uuids, peers, problem, torch.version.hip)


def parse_gpus(text: str) -> list[Gpu]:
    """Parse `nvidia-smi --query-gpu=<QUERY> --format=csv,noheader,nounits`."""
    rows = (re.fullmatch(r"(\d+), GPU-(\S+), (\S+)", line) for line in text.splitlines())
    return [  # memory may be [N/A]
        Gpu(int(row[1]), row[2], int(row[3]) if row[3].isdigit() else 0) for row in rows if row
    ]


def gpu_checks(gpus: Sequence[Gpu], in_torch: TorchGpus, ranks: int) -> list[Check]:
    """Compare the GPUs of nvidia-smi with those visible to torch and the number of ranks."""
    visible = len(in_torch.uuids)
    if not gpus and not visible:
        return [Check("gpus", SKIP, "no GPU here")]
    status, detail, fix = OK, f"nvidia-smi lists {len(gpus)}; torch sees {visible}", ""
    if in_torch.rocm:
        detail = f"ROCm {in_torch.rocm}: torch sees {visible}; memory in use is not read"
    if not visible:
        status, detail = FAIL, f"{detail}: {in_torch.problem}"
        fix = "check CUDA_VISIBLE_DEVICES; install a torch build for this driver: pytorch.org"
    elif visible < ranks:
        status, detail = FAIL, f"{detail}, fewer than the {ranks} ranks"
        fix = f"start {visible}: deepspeed --num_gpus {visible}; or check CUDA_VISIBLE_DEVICES"
    checks = [Check("gpus", status, detail, fix)]
    busy = [f"GPU {gpu.index}: {gpu.used_mib:,} MiB" for gpu in gpus if gpu.used_mib > _USED_MIB]
    if busy:
        fix = "find the process with nvidia-smi; end a leftover rank by its process id"
        checks.append(Check("gpu in use", WARN, "; ".join(busy), fix))
    return checks


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Parse `nvidia-smi topo -m` into GPU pairs and their link, for example PHB or NV12."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # underlined headings
    columns: list[int] = []
    links = {}
    for line in text.splitlines():
        cells = line.split()
        gpus = [int(cell[3:]) for cell in cells if re.fullmatch(r"GPU\d+", cell)]
        if not columns:
            columns = gpus  # the heading
        elif gpus and cells[0] == f"GPU{gpus[0]}":
            for other, link in zip(columns, cells[1:], strict=False):
                if other > gpus[0]:
                    links[gpus[0], other] = link
    return links


def topology_check(
    links: Mapping[tuple[int, int], str],
    peers: Mapping[tuple[int, int], bool],
    rocm: str | None = None,
) -> Check:
    """Report each pair's link; warn about missing peer access.

    `peers`: whether the first GPU of a pair can read the second's memory.
    """
    pairs = [f"GPU {first} and {second}: {link}" for (first, second), link in links.items()]
    unread = "links of AMD's GPUs are not read: rocm-smi --showtopo prints them"
    unread = unread if rocm else "nvidia-smi topo -m is not readable"
    detail = "; ".join(pairs[:3]) or unread
    detail += f"; and {len(pairs) - 3} more pairs" if pairs[3:] else ""
    missing = [f"{first}->{second}" for (first, second), access in peers.items() if not access]
    if missing:
        detail += f"; no peer access {', '.join(missing[:4])}{' and more' if missing[4:] else ''}: "
        detail += "data goes through /dev/shm, at about half the speed"
        fix = "normal on some boards and in virtual machines; else check the BIOS and iommu=pt"
        return Check("topology", WARN, detail, fix)
    return Check("topology", OK if links else SKIP, detail)


def p2p_disabled(variables: Mapping[str, str]) -> bool:
    """Return whether NCCL's variables disable peer access between GPUs."""
    level = variables.get("NCCL_P2P_LEVEL", "").upper()
    return variables.get("NCCL_P2P_DISABLE") == "1" or level in ("LOC", "0")
