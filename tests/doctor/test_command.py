"""`nsa doctor` on this machine: output, exit codes, JSON; the code fingerprint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa.cli import main
from nsa.doctor.node import FAIL, OK, SKIP, WARN, Check, failures, lines, node_checks, passed
from nsa.doctor.ranks import code_fingerprint

CHECKS = [
    Check("torch", OK, "2.13.0"),
    Check("/dev/shm", WARN, "512 MiB free", "docker run --shm-size=8g"),
    Check("topology", SKIP, "no GPU here", "never shown"),
    Check("disk", FAIL, "1 GB free", "free some"),
]


def test_a_check_is_one_line_with_the_fix_below() -> None:
    assert lines(CHECKS) == [
        "ok   torch     2.13.0",
        "warn /dev/shm  512 MiB free",
        "               -> docker run --shm-size=8g",
        "skip topology  no GPU here",
        "fail disk      1 GB free",
        "               -> free some",
    ]


def test_only_a_failure_prevents_a_run() -> None:
    assert not passed(CHECKS)
    assert passed(CHECKS[:3])
    assert failures(CHECKS) == "disk: 1 GB free (free some)"
    assert failures(CHECKS[:3]) == ""


def test_this_machine_passes_for_a_small_run_and_nothing_is_written(tmp_path: Path) -> None:
    checks = node_checks(tmp_path / "not/there", parameters=10**6, checkpoints=2)
    assert passed(checks), lines(checks)
    statuses = {check.name: check.status for check in checks}
    assert statuses["torch"] == statuses["deepspeed"] == statuses["disk"] == OK
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_small_for_the_checkpoints_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--run-dir", str(tmp_path), "--checkpoints", str(10**9)]) == 2
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fail")]
    assert len(failed) == 1
    assert "1000000000 checkpoints of 2.00 GB" in failed[0]


def test_an_impossible_run_folder_is_a_failure_without_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["doctor", "--run-dir", str(tmp_path / "file/run"), "--parameters", "1000"]) == 2
    assert "cannot be written to: Not a directory" in capsys.readouterr().out


def test_json_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["doctor", "--run-dir=~/runs", "--parameters", "1000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (disk,) = (check["detail"] for check in found if check["name"] == "disk")
    assert f" GB free in {tmp_path}; " in disk
    assert {"name": "ranks", "status": "skip"}.items() <= found[-1].items()
    assert all(set(check) == {"name", "status", "detail", "fix"} for check in found)


def test_the_fingerprint_depends_on_file_names_and_contents(tmp_path: Path) -> None:
    def fingerprint_of(name: str, text: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
        return code_fingerprint(folder)

    first = fingerprint_of("ops/a.py", "x = 1\n")
    assert fingerprint_of("ops/a.py", "x = 1\n") == first
    assert fingerprint_of("ops/a.py", "x = 2\n") != first
    assert fingerprint_of("ops/b.py", "x = 1\n") != first
    assert len(code_fingerprint()) == 12
