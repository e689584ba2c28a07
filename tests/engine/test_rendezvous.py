"""Rendezvous: ranks find the file of a rank 0 that runs, in a folder that only this user enters."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from nsa.engine.process_group import (
    create_rendezvous,
    end_process,
    find_rendezvous,
    private_folder,
    run_name,
)
from tests.ranks import spawn_ranks

SOON = timedelta(seconds=0.1)


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def folder_in(tmp_path: Path) -> Path:
    return tmp_path / f"nsa-{os.getuid()}"


def test_other_ranks_find_the_file_of_rank_0_which_only_the_user_can_open() -> None:
    path = create_rendezvous("7-29500")
    assert find_rendezvous("7-29500", SOON) == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for other_run in ("8-29500", "7-29501"):
        with pytest.raises(ValueError, match="rank 0 did not come"):
            find_rendezvous(other_run, SOON)


@pytest.mark.parametrize("kind", ["open to a group", "open to others", "a link", "another user's"])
def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, kind: str) -> None:
    folder = folder_in(tmp_path)
    folder.mkdir(mode=0o700)
    if kind == "a link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif kind == "another user's":
        if os.getuid():
            pytest.skip("only root can give a folder to another user")
        os.chown(folder, 65534, 65534)
    else:
        folder.chmod(0o710 if kind == "open to a group" else 0o702)
    for refuse in (lambda: create_rendezvous("7-1"), lambda: find_rendezvous("7-1", SOON)):
        with pytest.raises(ValueError, match=r"only you can enter.*set TMPDIR"):
            refuse()


def test_what_an_ended_run_left_is_ignored_and_removed() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    reused = f"7-1.{os.getpid()}.0"  # this process's number, of one that started long before
    left = [private_folder() / name for name in (f"7-1.{ended.pid}.5", reused)]
    for path in left:
        path.touch()
    with pytest.raises(ValueError, match="rank 0 did not come"):
        find_rendezvous("7-1", SOON)
    create_rendezvous("7-1")
    assert not any(path.exists() for path in left)


def test_a_second_run_of_the_same_launcher_and_port_is_refused() -> None:
    create_rendezvous("7-29500")
    with pytest.raises(ValueError, match=rf"--master_port 29500: .* process {os.getpid()};"):
        create_rendezvous("7-29500")


def test_runs_of_two_launchers_may_have_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv("CROSS_RANK", raising=False)
    assert run_name() == "0-29500"
    monkeypatch.setenv("CROSS_RANK", "1")
    assert run_name() == f"{os.getppid()}-29500"


def test_under_torchrun_ranks_meet_at_its_own_rendezvous(tmp_path: Path) -> None:
    """Which may start them again, so that they would join twice."""
    (program := tmp_path / "join.py").write_text(
        "import tempfile\n"
        "from nsa.engine.process_group import Ranks, start_ranks, stop_ranks\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "start_ranks(Ranks.from_environment())\nstop_ranks()\n"
    )
    for environment in ({}, {"TORCHELASTIC_RUN_ID": "none"}):
        ranks = spawn_ranks(program, ranks=1, environment=environment)
        assert ranks.codes(60) == [0], ranks.text("err")
        assert folder_in(tmp_path).exists() == (not environment)
        shutil.rmtree(folder_in(tmp_path), ignore_errors=True)


def test_a_rank_0_removes_its_file_as_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)
    path = create_rendezvous("7-29500")
    with pytest.raises(SystemExit, match="5"):
        end_process(5)
    assert not path.exists()
