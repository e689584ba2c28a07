"""A user's own DeepSpeed script on CPU does not wait in silence for `deepspeed_shm_comm`."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

from nsa.engine.shared_memory_op import BUILD_SECONDS, limit_build_wait
from tests.ranks import SpawnedRanks, spawn_ranks

PROGRAM = Path(__file__).with_name("shared_memory_op_rank.py")


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock of a build by another process that was killed."""
    folder = tmp_path / "deepspeed_shm_comm"
    folder.mkdir()
    lock = folder / "lock"
    lock.touch()
    started = time.time() - BUILD_SECONDS - 1
    os.utime(lock, (started, started))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return lock


def run(*arguments: str) -> tuple[int | None, SpawnedRanks]:
    """Return the exit code of a user's script, and its process for the output."""
    ranks = spawn_ranks(PROGRAM, *arguments, ranks=1)
    try:
        (code,) = ranks.codes(120)
    finally:
        ranks.end()
    return code, ranks


def test_the_helper_skips_the_operation(lock: Path) -> None:
    code, ranks = run("skip")
    assert code == 0, ranks.text("err")
    assert "trained" in ranks.text("out")
    assert "deepspeed_shm_comm" not in ranks.text("err")


def test_a_killed_build_is_an_error_that_names_its_lock(lock: Path) -> None:
    code, ranks = run()
    assert code == 1
    errors = ranks.text("err")
    error = errors.strip().splitlines()[-1]
    assert error.startswith(f"TimeoutError: {lock}: left by a build")
    assert f"rm {lock}" in error
    assert "nsa.engine.disable_shared_memory_op()" in error
    assert "about a minute; nsa.engine.disable_shared_memory_op()" in errors


def test_a_running_build_is_waited_for(lock: Path) -> None:
    os.utime(lock)
    comm = ModuleType("deepspeed.comm.torch")
    comm.build_shm_op = lock.exists  # type: ignore[attr-defined]
    limit_build_wait(comm)
    threading.Timer(1, lock.unlink).start()
    with pytest.warns(UserWarning, match="about a minute"):
        assert comm.build_shm_op() is False  # called once the other build has ended
