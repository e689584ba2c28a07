"""A user's own DeepSpeed script on CPU does not wait in silence for `deepspeed_shm_comm`."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

from nsa.engine.shared_memory_op import BUILD_SECONDS, limit_build_wait
from tests.ranks import spawn_ranks

SCRIPT = """
import os, sys
import deepspeed, torch
from nsa.engine import disable_shared_memory_op
from nsa.model import LanguageModel, ModelConfig

if "skip" in sys.argv:
    disable_shared_memory_op()
sizes = dict(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=16)
model = LanguageModel(ModelConfig(vocab_size=31, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
ids = torch.arange(20)[None]
engine.backward(engine(ids[:, :-1], labels=ids[:, 1:]))
engine.step()
print("trained", flush=True)
os._exit(0)
"""


@pytest.fixture
def environment(tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """One rank that another process's build of the operation keeps waiting."""
    folder = tmp_path / "deepspeed_shm_comm"
    folder.mkdir()
    lock = folder / "lock"
    lock.touch()
    started = time.time() - BUILD_SECONDS - 1
    os.utime(lock, (started, started))
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return {**ranks, **address, "TORCH_EXTENSIONS_DIR": str(tmp_path)}


def run(environment: dict[str, str], folder: Path, *arguments: str) -> tuple[int | None, str, str]:
    """Run the user's script; return its exit code, stdout and stderr."""
    (program := folder / "script.py").write_text(SCRIPT)
    process = spawn_ranks(program, *arguments, ranks=0, environment=environment)
    try:
        (code,) = process.codes(120)
    finally:
        process.end()
    return code, process.text("out"), process.text("err")


def test_the_helper_skips_the_operation(environment: dict[str, str], tmp_path: Path) -> None:
    code, out, err = run(environment, tmp_path, "skip")
    assert code == 0, err
    assert "trained" in out
    assert "deepspeed_shm_comm" not in err


def test_a_killed_build_is_an_error_that_names_its_lock(
    environment: dict[str, str], tmp_path: Path
) -> None:
    code, _, err = run(environment, tmp_path)
    assert code == 1
    lock = tmp_path / "deepspeed_shm_comm/lock"
    error = err.strip().splitlines()[-1]
    assert error.startswith(f"TimeoutError: {lock}: left by a build")
    assert f"rm {lock}" in error
    assert "nsa.engine.disable_shared_memory_op()" in error
    assert "about a minute; nsa.engine.disable_shared_memory_op()" in err


def test_a_running_build_is_waited_for(environment: dict[str, str], tmp_path: Path) -> None:
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    os.utime(lock)
    comm = ModuleType("deepspeed.comm.torch")
    comm.build_shm_op = lock.exists  # type: ignore[attr-defined]
    limit_build_wait(comm)
    threading.Timer(1, lock.unlink).start()
    with pytest.warns(UserWarning, match="about a minute"):
        assert comm.build_shm_op() is False  # called once the other build has ended
