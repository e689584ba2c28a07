"""NCCL settings for GPUs on PCIe, for launch/m7c_pcie.sh: python -m nsa.doctor.pcie

Prints NCCL_P2P_DISABLE=1 if this machine needs it (usually not), and the reason on stderr.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from nsa.system import output_of, text_or_empty

IOMMU_GROUPS = Path("/sys/kernel/iommu_groups")


def iommu_redirects(groups: Path, kernel: str) -> bool:
    """Return whether the IOMMU is on and not in pass-through mode: peer transfers may hang.

    `groups`: a folder without entries if it is off; `kernel`: the kernel's command line.
    """
    return groups.is_dir() and any(groups.iterdir()) and "iommu=pt" not in kernel.split()


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


def may_hang(links: Iterable[str], redirects: bool, variables: Mapping[str, str]) -> bool:
    """Return whether peer transfers over these links may hang, and the user has not decided."""
    by_user = {"NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"} & set(variables)
    return redirects and not by_user and not all(link.startswith("NV") for link in links)


def main() -> None:
    """Print the setting, and its reason on stderr."""
    links = parse_topology(output_of("nvidia-smi", "topo", "-m"))
    if not links:
        import torch  # late: slow

        if torch.version.hip:
            sys.exit("pcie: needs nvidia-smi, and this torch is a ROCm build; use launch/m7c.sh")
    redirects = iommu_redirects(IOMMU_GROUPS, text_or_empty("/proc/cmdline"))
    if may_hang(links.values(), redirects, os.environ):
        why = "the IOMMU redirects peer transfers, which may hang: safe, but slower; add iommu=pt "
        why += "to the kernel's command line instead"
        print(f"pcie: set  NCCL_P2P_DISABLE=1: {why}", file=sys.stderr)
        print("NCCL_P2P_DISABLE=1")
    else:
        print("pcie: set  nothing: NCCL needs no setting here", file=sys.stderr)


if __name__ == "__main__":
    main()
