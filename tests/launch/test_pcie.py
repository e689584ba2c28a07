"""`launch/m7c_pcie.sh` sets NCCL's variable only where peer transfers may hang, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.clone import make_clone, start

NOTHING = "pcie: set  nothing"


@pytest.mark.parametrize(
    ("groups", "kernel", "variables", "disabled"),
    [
        (["0"], "intel_iommu=on quiet", {}, True),
        (["0"], "quiet", {"NCCL_P2P_LEVEL": "PHB"}, False),
        (["0"], "quiet", {"NCCL_P2P_DISABLE": "0"}, False),
        (["0"], "quiet iommu=pt", {}, False),
        ([], "quiet", {}, False),  # off
        (None, "quiet", {}, False),  # the kernel has none
    ],
)
def test_peer_access_is_disabled_where_it_may_hang_and_the_user_has_not_decided(
    groups: list[str] | None,
    kernel: str,
    variables: dict[str, str],
    disabled: bool,
    tmp_path: Path,
) -> None:
    clone, folder = make_clone(tmp_path), tmp_path / "groups"
    for name in groups or ():
        (folder / name).mkdir(parents=True)
    if groups == []:
        folder.mkdir()
    (tmp_path / "cmdline").write_text(f"{kernel}\n")
    script = clone / "launch/m7c_pcie.sh"
    text = script.read_text().replace("/sys/kernel/iommu_groups", str(folder))
    script.write_text(text.replace("/proc/cmdline", str(tmp_path / "cmdline")))
    (clone / "launch/m7c.sh").write_text('env | grep NCCL_P2P; echo given "$@"\n')
    for arguments in (("--restart", "3", "--steps", "5"), ("--check",)):
        process = start(clone, "m7c_pcie.sh", *arguments, **variables)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert err.startswith("pcie: set  NCCL_P2P_DISABLE=1: the IOMMU" if disabled else NOTHING)
        if arguments == ("--check",):
            assert out == "", "it starts no run"
        else:
            assert ("NCCL_P2P_DISABLE=1" in out) == disabled
            assert out.endswith("given --restart 3 --steps 5\n")
