"""What NCCL must be told on a machine whose GPUs are joined by PCIe, which is mostly nothing.

    python -m nsa.doctor.pcie

prints NAME=value for each variable that this machine needs, for launch/m7c_pcie.sh to set, and on
stderr what was looked at and why.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nsa.doctor.check import WARN, Check, lines, verdict
from nsa.doctor.gpus import acs_check, parse_topology, topology_check
from nsa.doctor.nccl import nccl_checks, peers_switched_off
from nsa.doctor.node import shm_check
from nsa.doctor.probes import free_bytes, iommu_groups, said_by, text_of

Pair = tuple[int, int]
_NEAREST_FIRST = ("PIX", "PXB", "PHB", "NODE", "SYS")


@dataclass(frozen=True)
class Setting:
    """A variable that this machine needs."""

    name: str
    value: str
    why: str


def choose_pair(links: Mapping[Pair, str], visible: str | None) -> Pair:
    """The two GPUs that train: those that were chosen, else the two with the least between them."""
    chosen = [int(word) for word in (visible or "").split(",") if word.strip().isdecimal()]
    if visible is not None and len(chosen) > 1:
        return min(chosen[:2]), max(chosen[:2])
    return min(links, key=lambda pair: (_distance(links[pair]), pair))


def settings(links: Mapping[Pair, str], acs: Check, variables: Mapping[str, str]) -> list[Setting]:
    """What has to be set for two GPUs of this machine; what the user has set is left alone."""
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    pair = choose_pair(links, visible)
    link, found = links.get(pair, ""), []
    if visible is None and pair != (0, 1):
        near = f"GPU {pair[0]} and {pair[1]} are joined by {link}, GPU 0 and 1 by {links[0, 1]}"
        found.append(Setting("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "numbers as nvidia-smi's"))
        found.append(Setting("CUDA_VISIBLE_DEVICES", f"{pair[0]},{pair[1]}", near))
    chosen = {"NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"} & set(variables)
    if acs.status == WARN and not link.startswith("NV") and not chosen:
        why = f"{acs.detail}: what GPUs send each other may hang; this is safe, and slower"
        found.append(Setting("NCCL_P2P_DISABLE", "1", why))
    return found


def main() -> int:
    """Print the settings; 2 where a run would fail for lack of shared memory."""
    links = parse_topology(said_by("nvidia-smi", "topo", "-m"))
    if not links:
        _say("no two GPUs here: nothing lies between them, and nothing is set")
        return 0
    variables = dict(os.environ)
    lspci = said_by("lspci", "-vvv") or None
    acs = acs_check(lspci, iommu_groups(), text_of(Path("/proc/cmdline")), 2)
    found = settings(links, acs, variables)
    pair = choose_pair(links, variables.get("CUDA_VISIBLE_DEVICES"))
    interfaces = [name for _, name in socket.if_nameindex()]
    checks = [topology_check({pair: links.get(pair, "unknown")}, 2), acs]
    checks += nccl_checks(variables, interfaces)
    if peers_switched_off(variables | {setting.name: setting.value for setting in found}):
        checks.append(shm_check(free_bytes(Path("/dev/shm")), 2, peer_access=False))
    _say(*lines(checks))
    for setting in found:
        _say(f"set  {setting.name}={setting.value}: {setting.why}")
        print(f"{setting.name}={setting.value}")
    if not found:
        _say("set  nothing: NCCL finds its way by itself here")
    return 0 if verdict(checks) else 2


def _distance(link: str) -> int:
    if link.startswith("NV"):
        return -1
    return _NEAREST_FIRST.index(link) if link in _NEAREST_FIRST else len(_NEAREST_FIRST)


def _say(*shown: str) -> None:
    for line in shown:
        print(f"pcie: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
