"""What the GPUs of a machine are, how they reach each other, and what may hang between them.

Each function judges text or numbers that it is given; `nsa.doctor.command` gathers them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.version import Version

from nsa.doctor.check import FAIL, OK, SKIP, WARN, Check

NO_GPU = "no GPU here"
SAFE = "if ranks hang or disagree, NCCL_P2P_DISABLE=1 is the safe slow way"

# The oldest Linux driver that runs programs of each major version of CUDA.
_OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
_USED_MIB = 2_000  # more than a display takes
# Bits of NVML's clock event reasons that mean heat or lack of power; the others are normal.
_SLOWDOWNS = {0x08: "hardware", 0x20: "heat (driver)", 0x40: "heat", 0x80: "power brake"}

# In the order of `nvidia-smi topo -m`: what the path is, and what an all-reduce over it can make,
# in GB/s, on PCIe 4.0 x16. Orders of magnitude: the rank check measures.
_LINKS = {
    "PIX": ("one PCIe switch", "20 to 25"),
    "PXB": ("several PCIe switches", "15 to 25"),
    "PHB": ("the processor's host bridge", "8 to 20"),
    "NODE": ("two host bridges of one NUMA node", "8 to 20"),
    "SYS": ("the link between two NUMA nodes", "4 to 12"),
}

QUERY = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "driver_version",
    "persistence_mode",
    "ecc.errors.uncorrected.volatile.total",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "clocks_throttle_reasons.active",
)


@dataclass(frozen=True)
class Gpu:
    """A row of `nvidia-smi --query-gpu`; what a board does not tell is None."""

    index: int
    uuid: str  # as torch gives it, without "GPU-"
    name: str
    memory_mib: int | None
    used_mib: int | None
    driver: str
    persistence: str
    ecc_errors: int | None
    width: int | None
    max_width: int | None
    slowdowns: int | None


def parse_gpus(text: str) -> list[Gpu]:
    """Rows of `nvidia-smi --query-gpu=<QUERY> --format=csv,noheader,nounits`."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(QUERY) or not cells[0].isdigit():
            continue
        index, uuid, name, total, used, driver, persistence, ecc, width, widest, reasons = cells
        found.append(
            Gpu(
                index=int(index),
                uuid=uuid.removeprefix("GPU-"),
                name=name,
                memory_mib=_number(total),
                used_mib=_number(used),
                driver=driver,
                persistence=persistence,
                ecc_errors=_number(ecc),
                width=_number(width),
                max_width=_number(widest),
                slowdowns=_number(reasons),
            )
        )
    return found


def _number(cell: str) -> int | None:
    """A decimal or hexadecimal number; `[N/A]` and the like are None."""
    try:
        return int(cell, 0)
    except ValueError:
        return None


def gpu_checks(gpus: Sequence[Gpu], visible: int, built_for: str | None, ranks: int) -> list[Check]:
    """`visible`: devices that torch sees, of the `gpus` that the driver has; `built_for`: the CUDA
    version of torch's build; `ranks` that will run on this machine."""
    if not gpus and not visible:
        return [Check("gpus", SKIP, NO_GPU)]
    checks = [_driver(gpus, visible, built_for)]
    models = sorted({f"{gpu.name}, {gpu.memory_mib or 0:,} MiB" for gpu in gpus})
    detail = f"{len(gpus)} x {' and '.join(models)}" if gpus else "nvidia-smi names none"
    detail += f"; torch sees {visible}"
    if 0 < visible < ranks:
        fix = f"start {visible}: deepspeed --num_gpus {visible}; or look at CUDA_VISIBLE_DEVICES"
        checks.append(Check("gpus", FAIL, f"{detail}, fewer than the {ranks} ranks", fix))
    elif len(models) > 1:
        fix = "every step waits for the slowest; name equal ones: deepspeed --include localhost:0"
        checks.append(Check("gpus", WARN, detail, fix))
    else:
        checks.append(Check("gpus", OK, detail))
    return checks + _health(gpus)


def _driver(gpus: Sequence[Gpu], visible: int, built_for: str | None) -> Check:
    """Whether this build of torch and this driver work together."""
    driver = gpus[0].driver if gpus else None
    if built_for is None and not visible:
        detail = f"this torch was built for the CPU, but the driver ({driver}) has {len(gpus)} GPUs"
        return Check("driver", FAIL, detail, "install a CUDA build of torch: see pytorch.org")
    oldest = _OLDEST_DRIVER.get(int((built_for or "0").split(".")[0]))
    if driver and oldest and Version(driver) < Version(oldest):
        detail = f"{driver} is older than CUDA {built_for} of this torch needs ({oldest})"
        return Check("driver", FAIL, detail, "update the driver, or install torch for its CUDA")
    if not visible:
        detail = f"{driver} has {len(gpus)} GPUs, but torch (CUDA {built_for}) can use none"
        fix = "look at CUDA_VISIBLE_DEVICES, and at what python -c 'import torch; "
        return Check("driver", FAIL, detail, fix + "torch.cuda.init()' says")
    return Check("driver", OK, f"{driver or 'unknown'}, torch for CUDA {built_for}")


def _health(gpus: Sequence[Gpu]) -> list[Check]:
    """Memory that others hold, errors, throttling, and a link that is narrower than it could be."""
    checks = []

    def add(name: str, status: str, found: list[str], fix: str) -> None:
        if found:
            checks.append(Check(name, status, "; ".join(found), fix))

    add(
        "gpu in use",
        WARN,
        [
            f"GPU {gpu.index}: {gpu.used_mib:,} MiB are taken"
            for gpu in gpus
            if (gpu.used_mib or 0) > _USED_MIB
        ],
        "see who with nvidia-smi; a rank that was left behind is ended by its process id",
    )
    add(
        "gpu errors",
        WARN,
        [
            f"GPU {gpu.index}: {gpu.ecc_errors} uncorrected memory errors since the driver loaded"
            for gpu in gpus
            if gpu.ecc_errors
        ],
        "restart the machine; a board on which they come back has to be replaced",
    )
    add(
        "gpu clocks",
        WARN,
        [
            f"GPU {gpu.index} is slowed down by {', '.join(reasons)}"
            for gpu in gpus
            if (reasons := [why for bit, why in _SLOWDOWNS.items() if (gpu.slowdowns or 0) & bit])
        ],
        "look at cooling and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
    )
    add(
        "gpu link",
        WARN,
        [
            f"GPU {gpu.index} uses {gpu.width} of {gpu.max_width} PCIe lanes"
            for gpu in gpus
            if gpu.width and gpu.max_width and gpu.width < gpu.max_width
        ],
        "seat the board again, or use a slot that is wired for all lanes",
    )
    add(
        "persistence",
        WARN,
        [f"off on GPU {gpu.index}" for gpu in gpus if gpu.persistence.lower() == "disabled"],
        "sudo nvidia-smi -pm 1: else each start waits for the driver to load",
    )
    return checks


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """The pairs of GPUs in `nvidia-smi topo -m` and the link between them, such as PHB or NV12."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # headings are underlined
    columns: list[int] = []
    links = {}
    for line in text.splitlines():
        cells = line.split()
        rows = [int(cell[3:]) for cell in cells if re.fullmatch(r"GPU\d+", cell)]
        if not columns and rows:
            columns = rows  # the heading
        elif columns and rows and cells[0] == f"GPU{rows[0]}":
            for other, link in zip(columns, cells[1:], strict=False):
                if other > rows[0]:
                    links[rows[0], other] = link
    return links


def topology_check(links: Mapping[tuple[int, int], str], gpus: int) -> Check:
    """What stands between the GPUs, and what to expect of it."""
    if gpus < 2:
        return Check("topology", SKIP, NO_GPU if gpus == 0 else "one GPU: nothing between")
    if not links:
        return Check("topology", SKIP, "nvidia-smi topo -m could not be read")
    shown, slow = [], False
    for (one, other), link in links.items():
        if link.startswith("NV"):
            shown.append(f"GPU {one} and {other}: NVLink ({link}), hundreds of GB/s")
        elif link in _LINKS:
            what, speed = _LINKS[link]
            shown.append(f"GPU {one} and {other}: {link}, {what}, {speed} GB/s")
            slow |= link == "SYS"
        else:
            shown.append(f"GPU {one} and {other}: {link}")
    detail = "; ".join(shown[:3]) + (f"; and {len(shown) - 3} pairs more" if shown[3:] else "")
    fix = "move a board to the other's NUMA node, or choose GPUs that share one (--include)"
    return Check("topology", WARN if slow else OK, detail, fix if slow else "")


def peer_check(peers: Mapping[tuple[int, int], bool], gpus: int) -> Check:
    """`peers`: whether the first GPU can read the second's memory."""
    if gpus < 2:
        return Check("peer access", SKIP, NO_GPU if gpus == 0 else "one GPU: no peers")
    missing = [pair for pair, able in peers.items() if not able]
    if not missing:
        return Check("peer access", OK, f"between all {gpus} GPUs")
    pairs = ", ".join(f"{one}->{other}" for one, other in missing[:4])
    detail = f"not between {pairs}{' and more' if missing[4:] else ''}: data goes through "
    detail += "/dev/shm, at about half the speed"
    fix = "normal on some boards and in virtual machines; else look at the BIOS and at iommu=pt"
    return Check("peer access", WARN, detail, fix)


def acs_check(lspci: str | None, iommu_groups: int, kernel: str, gpus: int) -> Check:
    """What redirects traffic between PCIe boards: it hangs, or it is slow, and nothing says so.

    `lspci`: text of `lspci -vvv`; `iommu_groups`: how many the kernel made; `kernel`: its command
    line.
    """
    if gpus < 2:
        return Check("acs, iommu", SKIP, NO_GPU if gpus == 0 else "one GPU: no traffic between")
    bridges = _redirecting_bridges(lspci or "")
    through = "iommu=pt" in kernel.split()
    if bridges:
        shown = f"{', '.join(bridges[:3])}{' and more' if bridges[3:] else ''}"
        fix = f"switch ACS off in the BIOS, or: setpci -s {bridges[0]} ECAP_ACS+0x6.w=0000; {SAFE}"
        return Check("acs, iommu", WARN, f"ACS redirects peer traffic at {shown}", fix)
    if iommu_groups and not through:
        detail = f"the IOMMU is on ({iommu_groups} groups) and not in pass-through"
        fix = f"add iommu=pt to the kernel's command line, or switch VT-d / AMD-Vi off; {SAFE}"
        return Check("acs, iommu", WARN, detail, fix)
    if lspci is None or "access denied" in lspci:
        detail = "the IOMMU is out of the way; ACS cannot be read by this user"
        return Check("acs, iommu", OK, f"{detail} (sudo lspci -vvv shows ACSCtl)")
    return Check("acs, iommu", OK, "nothing redirects traffic between boards")


def _redirecting_bridges(lspci: str) -> list[str]:
    """Addresses of bridges whose ACS sends requests up to the root instead of across."""
    found = []
    for device in re.split(r"\n(?=\S)", lspci):
        title = device.partition("\n")[0]
        if "PCI bridge" in title and re.search(r"ACSCtl:.*\b(?:SrcValid|ReqRedir)\+", device):
            found.append(title.split()[0])
    return found
