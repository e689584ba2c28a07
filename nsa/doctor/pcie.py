"""NCCL settings for two GPUs on PCIe, for launch/m7c_pcie.sh: python -m nsa.doctor.pcie

Prints NAME=value for each variable that this machine needs (usually none); reasons go to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from nsa.doctor.check import WARN, Check
from nsa.doctor.gpus import parse_topology, read_acs
from nsa.system import output_of

Pair = tuple[int, int]
_NEAREST_FIRST = ("PIX", "PXB", "PHB", "NODE", "SYS")  # after NVLink


def select_pair(links: Mapping[Pair, str], visible: str | None) -> Pair:
    """Return the two GPUs of CUDA_VISIBLE_DEVICES, or else the pair with the shortest path."""
    indices = [int(word) for word in (visible or "").split(",") if word.strip().isdecimal()]
    if len(indices) > 1:
        return min(indices[:2]), max(indices[:2])
    order = {link: place for place, link in enumerate(_NEAREST_FIRST)}
    distances = {
        pair: -1 if link.startswith("NV") else order.get(link, len(order))
        for pair, link in links.items()
    }
    return min(links, key=lambda pair: (distances[pair], pair))


def settings(
    links: Mapping[Pair, str], acs: Check, variables: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Return name, value and reason of the variables that two GPUs need.

    Those that the user has set take precedence.
    """
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    pair = select_pair(links, visible)
    link, needed = links.get(pair, ""), {}
    if visible is None and pair != (0, 1):
        why = f"GPU {pair[0]} and {pair[1]} are joined by {link}, GPU 0 and 1 by {links[0, 1]}"
        needed["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID", "same numbers as nvidia-smi"
        needed["CUDA_VISIBLE_DEVICES"] = f"{pair[0]},{pair[1]}", why
    by_user = {"NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"} & set(variables)
    if acs.status == WARN and not link.startswith("NV") and not by_user:
        why = f"{acs.detail}: peer transfers may hang; safe, but slower; nsa doctor prints the fix"
        needed["NCCL_P2P_DISABLE"] = "1", why
    return needed


def main() -> None:
    """Print the settings, and their reasons on stderr."""
    links = parse_topology(output_of("nvidia-smi", "topo", "-m"))
    if not links:
        import torch  # late: slow

        if torch.version.hip:
            sys.exit("pcie: needs nvidia-smi, and this torch is a ROCm build; use launch/m7c.sh")
    needed = settings(links, read_acs(), os.environ) if links else {}
    for name, (value, why) in needed.items():
        print(f"pcie: set  {name}={value}: {why}", file=sys.stderr)
        print(f"{name}={value}")
    if not needed:
        print("pcie: set  nothing: NCCL needs no setting here", file=sys.stderr)


if __name__ == "__main__":
    main()
