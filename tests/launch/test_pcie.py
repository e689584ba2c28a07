"""`launch/m7c_pcie.sh` sets only the variables that the node needs, and prints the reason of each.

`nvidia-smi` and `lspci` are replaced by scripts that print output recorded on real GPU nodes.
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
        (
            TOPO_SYS.replace("GPU2\tSYS\tSYS\t X \tPIX", "GPU2\tSYS\tSYS\t X \tNV12"),
            CLEAR,
            {},
            {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2,3"},
        ),
        (FAR_APART, CLEAR, {"CUDA_VISIBLE_DEVICES": "1,0"}, {}),
    ],
    ids=[
        "clear",
        "acs",
        "own level",
        "own choice",
        "nvlink",
        "near",
        "far apart",
        "nvlink elsewhere",
        "own gpus",
    ],
)
def test_only_needed_variables_are_set_and_the_users_own_are_kept(
    topology: str, acs: Check, variables: dict[str, str], expected: dict[str, str]
) -> None:
    needed = settings(parse_topology(topology), acs, variables)
    assert {name: value for name, (value, _) in needed.items()} == expected


def call(
    folder: Path, topology: str, lspci: str, *arguments: str, **variables: str
) -> tuple[int, str]:
    """Run the script with the recorded outputs; return its exit code and output."""
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


def test_the_run_gets_the_variables_and_the_output_their_reasons(real_packages: Path) -> None:
    code, output = call(real_packages, FAR_APART, LSPCI_ACS, "--restart", "3", "--steps", "5")
    assert code == 0, output
    lines = output.splitlines()
    for setting in ("CUDA_VISIBLE_DEVICES=2,3", "NCCL_P2P_DISABLE=1"):
        assert setting in lines  # the environment of launch/m7c.sh
        assert any(line.startswith(f"pcie: set  {setting}: ") for line in lines), output
    assert "given --restart 3 --steps 5" in lines
    assert "GPU 2 and 3 are joined by PIX, GPU 0 and 1 by SYS" in output
    assert "ACS redirects peer traffic at 16:00.0" in output


def test_check_starts_no_run(real_packages: Path) -> None:
    code, output = call(real_packages, TOPO_NVLINK, LSPCI_CLEAR, "--check")
    assert code == 0, output
    assert "given" not in output
    assert "pcie: set  nothing" in output
