"""NCCL settings for two GPUs on PCIe, for launch/m7c_pcie.sh: python -m nsa.doctor.pcie

Prints NAME=value for each variable that this machine needs (usually none); checks and reasons go
to stderr.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping

from nsa.doctor.check import WARN, Check, lines, passed
from nsa.doctor.gpus import acs_check, parse_topology, topology_check
from nsa.doctor.nccl import nccl_checks, p2p_disabled
from nsa.doctor.node import shm_check
from nsa.probes import free_bytes, iommu_groups, output_of, text_of

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
        why = f"{acs.detail}: peer transfers may hang; this is safe, but slower"
        needed["NCCL_P2P_DISABLE"] = "1", why
    return needed


def main() -> int:
    """Print the settings; return 2 if a run would fail."""
    links = parse_topology(output_of("nvidia-smi", "topo", "-m"))
    if not links:
        _log("fewer than two GPUs here: nothing to set")
        return 0
    variables = dict(os.environ)
    acs = acs_check(output_of("lspci", "-vvv"), iommu_groups(), text_of("/proc/cmdline"), 2)
    needed = settings(links, acs, variables)
    pair = select_pair(links, variables.get("CUDA_VISIBLE_DEVICES"))
    checks = [topology_check({pair: links.get(pair, "unknown")}, 2, {}), acs]
    checks += nccl_checks(variables, [name for _, name in socket.if_nameindex()])
    if p2p_disabled(variables | {name: value for name, (value, _) in needed.items()}):
        checks.append(shm_check(free_bytes("/dev/shm"), 2, peer_access=False))
    _log(*lines(checks))
    for name, (value, why) in needed.items():
        _log(f"set  {name}={value}: {why}")
        print(f"{name}={value}")
    if not needed:
        _log("set  nothing: NCCL needs no setting here")
    return 0 if passed(checks) else 2


def _log(*messages: str) -> None:
    for message in messages:
        print(f"pcie: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
