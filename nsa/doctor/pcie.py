"""NCCL settings for GPUs on PCIe, for launch/m7c_pcie.sh: python -m nsa.doctor.pcie

Prints NAME=value for each variable that this machine needs (usually none); reasons go to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from nsa.doctor.node import parse_topology
from nsa.system import output_of, text_or_empty

IOMMU_GROUPS = Path("/sys/kernel/iommu_groups")


def iommu_redirects(groups: Path, kernel: str) -> bool:
    """Return whether the IOMMU is on and not in pass-through mode: peer transfers may hang.

    `groups`: a folder without entries if it is off; `kernel`: the kernel's command line.
    """
    return groups.is_dir() and any(groups.iterdir()) and "iommu=pt" not in kernel.split()


def settings(
    links: Iterable[str], redirects: bool, variables: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Return name, value and reason of the variables that GPUs with these links need.

    Those that the user has set take precedence.
    """
    by_user = {"NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"} & set(variables)
    if not redirects or by_user or all(link.startswith("NV") for link in links):
        return {}
    why = "the IOMMU redirects peer transfers, which may hang: safe, but slower; add iommu=pt to "
    why += "the kernel's command line instead"
    return {"NCCL_P2P_DISABLE": ("1", why)}


def main() -> None:
    """Print the settings, and their reasons on stderr."""
    links = parse_topology(output_of("nvidia-smi", "topo", "-m"))
    if not links:
        import torch  # late: slow

        if torch.version.hip:
            sys.exit("pcie: needs nvidia-smi, and this torch is a ROCm build; use launch/m7c.sh")
    redirects = iommu_redirects(IOMMU_GROUPS, text_or_empty("/proc/cmdline"))
    needed = settings(links.values(), redirects, os.environ)
    for name, (value, why) in needed.items():
        print(f"pcie: set  {name}={value}: {why}", file=sys.stderr)
        print(f"{name}={value}")
    if not needed:
        print("pcie: set  nothing: NCCL needs no setting here", file=sys.stderr)


if __name__ == "__main__":
    main()
