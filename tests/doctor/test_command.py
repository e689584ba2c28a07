"""`nsa doctor` on this machine, and what is shown of what it finds."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from nsa.cli import main
from nsa.doctor.check import FAIL, OK, SKIP, WARN, Check, failures, lines, verdict
from nsa.doctor.command import (
    checkpoint_bytes,
    code_fingerprint,
    dry_batch_check,
    kept_checkpoints,
    node_checks,
)

CHECKS = [
    Check("torch", OK, "2.13.0"),
    Check("/dev/shm", WARN, "512 MiB free", "docker run --shm-size=8g"),
    Check("topology", SKIP, "no GPU here", "never shown"),
    Check("disk", FAIL, "1 GB free", "free some"),
]


def test_a_check_is_one_line_and_what_is_not_well_has_its_mend_below() -> None:
    assert lines(CHECKS) == [
        "ok   torch     2.13.0",
        "warn /dev/shm  512 MiB free",
        "               -> docker run --shm-size=8g",
        "skip topology  no GPU here",
        "fail disk      1 GB free",
        "               -> free some",
    ]


def test_only_a_failure_keeps_a_run_from_starting() -> None:
    assert not verdict(CHECKS)
    assert verdict(CHECKS[:3])
    assert failures(CHECKS) == "disk: 1 GB free (free some)"
    assert failures(CHECKS[:3]) == ""


def test_this_machine_is_fit_for_a_small_run_and_leaves_no_trace_of_being_asked(
    tmp_path: Path,
) -> None:
    checks = node_checks(
        tmp_path / "not/there", checkpoint_bytes=checkpoint_bytes(10**6), checkpoints=2
    )
    assert verdict(checks), lines(checks)
    statuses = {check.name: check.status for check in checks}
    assert statuses["torch"] == statuses["deepspeed"] == statuses["disk"] == OK
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_small_for_the_checkpoints_fails_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--run-dir", str(tmp_path), "--checkpoints", str(10**9)]) == 2
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fail")]
    assert len(failed) == 1
    assert "1000000000 checkpoints of 2.00 GB" in failed[0]


def test_a_run_folder_that_cannot_be_is_a_failure_not_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["doctor", "--run-dir", str(tmp_path / "file/run"), "--parameters", "1000"]) == 2
    assert "cannot be written to: Not a directory" in capsys.readouterr().out


def test_the_limits_of_this_process_are_seen(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        checks = node_checks(tmp_path, checkpoint_bytes=1, checkpoints=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [check.status for check in checks if check.name == "open files"] == [WARN]


def test_variables_of_nccl_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "NCCL_DEBGU", "INFO")
    checks = node_checks(tmp_path, checkpoint_bytes=1, checkpoints=1)
    (found,) = [check for check in checks if check.name == "nccl settings"]
    assert found.fix == "did you mean NCCL_DEBUG?"


def test_programs_get_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--run-dir", str(tmp_path), "--parameters", "1000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"name": "ranks", "status": "skip"}.items() <= found[-1].items()
    assert all(set(check) == {"name", "status", "detail", "fix"} for check in found)


def test_a_number_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ranks", "0"]) == 2
    assert capsys.readouterr().err == "nsa: --ranks 0: must be 1 or more\n"


def test_the_fingerprint_changes_with_what_the_code_says_and_where_it_stands(
    tmp_path: Path,
) -> None:
    def written(name: str, text: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
        return code_fingerprint(folder)

    first = written("ops/a.py", "x = 1\n")
    assert written("ops/a.py", "x = 1\n") == first
    assert written("ops/a.py", "x = 2\n") != first
    assert written("ops/b.py", "x = 1\n") != first
    assert code_fingerprint() == code_fingerprint()
    assert len(code_fingerprint()) == 12


@pytest.mark.parametrize(
    ("steps", "every", "keep", "done", "count"),
    [
        (50_000, 5_000, 0, 0, 10),
        (50_000, 5_000, 3, 0, 4),  # the fourth lies there until the first is removed
        (50_000, 5_000, 0, 45_000, 1),
        (300, 5_000, 0, 0, 1),
        (301, 100, 0, 0, 4),  # the last step is always saved
        (300, 0, 0, 0, 1),
        (300, 100, 0, 300, 1),
    ],
)
def test_the_checkpoints_that_a_run_will_hold_are_counted(
    steps: int, every: int, keep: int, done: int, count: int
) -> None:
    assert kept_checkpoints(steps, every, keep, done) == count


def test_a_dry_batch_that_ran_out_of_memory_is_told_what_to_change() -> None:
    assert dry_batch_check("loss 10.9 in 2.1 s").status == OK
    found = dry_batch_check("micro-batch 2 of 2,048", MemoryError("no more\nat all"))
    assert (found.status, found.detail) == (
        FAIL,
        "micro-batch 2 of 2,048: MemoryError: no more",
    )
