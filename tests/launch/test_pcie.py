"""`launch/m7c_pcie.sh`: what a machine needs is set, nothing else, and each with its reason.

Machines with GPUs can't be had here: their `nvidia-smi` and `lspci` are stand-ins that print what
the real ones print there.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nsa.doctor.check import OK, WARN, Check
from nsa.doctor.gpus import parse_topology
from nsa.doctor.pcie import settings
from tests.doctor.recorded import LSPCI_ACS, LSPCI_CLEAR, TOPO_NVLINK, TOPO_PHB, TOPO_SYS
from tests.launch.clone import start

CLEAR = Check("acs, iommu", OK, "nothing redirects traffic between boards")
REDIRECTED = Check("acs, iommu", WARN, "ACS redirects peer traffic at 16:00.0")
FAR_APART = TOPO_SYS.replace("GPU0\t X \tPIX", "GPU0\t X \tSYS")


@pytest.mark.parametrize(
    ("topology", "acs", "variables", "expected"),
    [
        (TOPO_PHB, CLEAR, {}, {}),
        (TOPO_PHB, REDIRECTED, {}, {"NCCL_P2P_DISABLE": "1"}),
        (TOPO_PHB, REDIRECTED, {"NCCL_P2P_LEVEL": "PHB"}, {}),
        (TOPO_PHB, REDIRECTED, {"NCCL_P2P_DISABLE": "0"}, {}),
        (TOPO_NVLINK, REDIRECTED, {}, {}),
        (TOPO_SYS, CLEAR, {}, {}),
        (
            FAR_APART,
            CLEAR,
            {},
            {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2,3"},
        ),
        (FAR_APART, CLEAR, {"CUDA_VISIBLE_DEVICES": "1,0"}, {}),
    ],
    ids=["clear", "acs", "own level", "own choice", "nvlink", "near", "far apart", "own gpus"],
)
def test_only_what_a_machine_needs_is_set_and_what_its_user_set_stays(
    topology: str, acs: Check, variables: dict[str, str], expected: dict[str, str]
) -> None:
    found = settings(parse_topology(topology), acs, variables)
    assert {setting.name: setting.value for setting in found} == expected


def call(
    folder: Path, topology: str, lspci: str, *arguments: str, **variables: str
) -> tuple[int, str]:
    """The script beside programs that print this; returns its exit code and all that it said."""
    tools = folder / "bin"
    tools.mkdir()
    for name, text in (("nvidia-smi", topology), ("lspci", lspci)):
        (folder / name).write_text(text)
        (tools / name).write_text(f"#!/bin/sh\nexec cat '{folder / name}'\n")
        (tools / name).chmod(0o755)
    (folder / "launch/m7c.sh").write_text("env | grep -E 'NCCL|CUDA' | sort; echo given \"$@\"\n")
    path = f"{tools}:{os.environ['PATH']}"
    process = start(folder, "m7c_pcie.sh", *arguments, PATH=path, **variables)
    out, err = process.communicate(timeout=120)
    return process.returncode, out + err


def test_the_run_gets_the_settings_and_the_user_the_reasons(real_packages: Path) -> None:
    code, said = call(real_packages, FAR_APART, LSPCI_ACS, "--restart", "3", "--steps", "5")
    assert code == 0, said
    lines = said.splitlines()
    for setting in ("CUDA_VISIBLE_DEVICES=2,3", "NCCL_P2P_DISABLE=1"):
        assert setting in lines  # in the environment of what it starts
        assert any(line.startswith(f"pcie: set  {setting}: ") for line in lines), said
    assert "given --restart 3 --steps 5" in lines
    assert "GPU 2 and 3 are joined by PIX, GPU 0 and 1 by SYS" in said
    assert "ACS redirects peer traffic at 16:00.0" in said


def test_check_only_looks(real_packages: Path) -> None:
    code, said = call(real_packages, TOPO_NVLINK, LSPCI_CLEAR, "--check")
    assert code == 0, said
    assert "given" not in said
    assert "pcie: set  nothing" in said


def test_a_variable_that_cannot_work_ends_it_with_the_mend(real_packages: Path) -> None:
    wrong = {"NCCL_SOCKET_IFNAME": "nowhere0"}
    code, said = call(real_packages, TOPO_PHB, LSPCI_CLEAR, **wrong)
    assert code == 2
    assert "given" not in said
    assert "NCCL_SOCKET_IFNAME=nowhere0 names no network interface" in said
