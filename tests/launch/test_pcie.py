"""`launch/m7c_pcie.sh` sets only the variables that the node needs, and prints the reason of each.

`nvidia-smi` is replaced by a script that prints output recorded on real GPU nodes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nsa.doctor.pcie import IOMMU_GROUPS, iommu_redirects, may_hang
from tests.doctor.recorded import TOPO_NVLINK, TOPO_PHB
from tests.launch.clone import start, write_script


@pytest.mark.parametrize(
    ("links", "redirects", "variables", "disabled"),
    [
        (["PHB"], True, {}, True),
        (["NV12", "PHB"], True, {}, True),
        (["PHB"], False, {}, False),
        (["NV12", "NV12"], True, {}, False),
        ([], True, {}, False),
        (["PHB"], True, {"NCCL_P2P_LEVEL": "PHB"}, False),
        (["PHB"], True, {"NCCL_P2P_DISABLE": "0"}, False),
    ],
)
def test_peer_access_is_disabled_where_it_may_hang_and_the_user_has_not_decided(
    links: list[str], redirects: bool, variables: dict[str, str], disabled: bool
) -> None:
    assert may_hang(links, redirects, variables) == disabled


def test_an_iommu_that_is_on_redirects_unless_it_passes_through(tmp_path: Path) -> None:
    assert not iommu_redirects(tmp_path, "quiet")
    assert not iommu_redirects(tmp_path / "none", "quiet")
    (tmp_path / "0").mkdir()
    assert iommu_redirects(tmp_path, "intel_iommu=on quiet")
    assert not iommu_redirects(tmp_path, "quiet iommu=pt")


def call(folder: Path, topology: str, *arguments: str, **variables: str) -> tuple[int, str]:
    """Run the script with the recorded outputs; return its exit code and output."""
    tools = folder / "bin"
    tools.mkdir()
    (folder / "topology").write_text(topology)
    write_script(tools / "nvidia-smi", f"#!/bin/sh\nexec cat '{folder / 'topology'}'\n")
    (folder / "launch/m7c.sh").write_text("env | grep -E 'NCCL|CUDA' | sort; echo given \"$@\"\n")
    path = f"{tools}:{os.environ['PATH']}"
    process = start(folder, "m7c_pcie.sh", *arguments, PATH=path, **variables)
    out, err = process.communicate(timeout=120)
    return process.returncode, out + err


def test_the_run_gets_the_variables_and_the_output_their_reasons(real_packages: Path) -> None:
    code, output = call(real_packages, TOPO_PHB, "--restart", "3", "--steps", "5")
    assert code == 0, output
    lines = output.splitlines()
    if iommu_redirects(IOMMU_GROUPS, Path("/proc/cmdline").read_text()):  # of this machine
        assert "NCCL_P2P_DISABLE=1" in lines  # the environment of launch/m7c.sh
        assert any(line.startswith("pcie: set  NCCL_P2P_DISABLE=1: the IOMMU") for line in lines)
    else:
        assert "pcie: set  nothing: NCCL needs no setting here" in lines
    assert "given --restart 3 --steps 5" in lines


def test_check_starts_no_run(real_packages: Path) -> None:
    code, output = call(real_packages, TOPO_NVLINK, "--check")
    assert code == 0, output
    assert "given" not in output
    assert "pcie: set  nothing" in output
