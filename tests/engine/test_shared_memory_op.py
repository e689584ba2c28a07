"""A user's own DeepSpeed script on CPU does not wait in silence for `deepspeed_shm_comm`."""

from __future__ import annotations

from pathlib import Path

from tests.ranks import spawn_ranks

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


def test_a_users_script_does_not_wait_for_a_killed_build(tmp_path: Path, free_port: int) -> None:
    (tmp_path / "deepspeed_shm_comm").mkdir()
    (tmp_path / "deepspeed_shm_comm/lock").touch()  # as a killed build of the operation leaves it
    (program := tmp_path / "script.py").write_text(SCRIPT)
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    process = spawn_ranks(program, ranks=1, port=free_port, environment=environment)
    try:
        (code,) = process.codes(60)
    finally:
        process.end()
    assert code == 0, process.text("err")
    assert "trained" in process.text("out")
    assert "deepspeed_shm_comm" not in process.text("err")
