"""A user's own DeepSpeed script on CPU skips the build of `deepspeed_shm_comm`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os
import deepspeed, torch
from nsa.engine import disable_shared_memory_op
from nsa.model import LanguageModel, ModelConfig

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
    """One rank that a killed build of the operation keeps waiting."""
    folder = tmp_path / "deepspeed_shm_comm"
    folder.mkdir()
    (folder / "lock").touch()
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return {**os.environ, **ranks, **address}


def test_the_operation_is_skipped(environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    assert "deepspeed_shm_comm" not in done.stderr
