"""Process group: where ranks listen, what they share of a machine, what they tell each other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.ranks import free_port, launch, spawn_ranks

LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("process_group")


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def outputs(folder: Path, port: int) -> list[list[str]]:
    """The lines of process_group_ranks.py on each rank."""
    program, planted = Path(__file__).with_name("process_group_ranks.py"), folder / "planted"
    texts = launch(program, str(planted), port=port, timeout=120)
    return [text.splitlines() for text in texts]


def test_ranks_listen_on_the_loopback_address_only_and_share_the_cores(
    outputs: list[list[str]], port: int
) -> None:
    """At the master port a stranger could join."""
    cores = len(os.sched_getaffinity(0))
    for rank, (threads, listening, *_) in enumerate(outputs):
        assert int(threads) == max(1, cores // (1 + rank)), "of 1 and of 2 ranks on its machine"
        name, *sockets = listening.split()
        assert name == "listening:"
        assert sockets, "the ranks connect to each other"
        addresses, ports = zip(*(socket.split(":") for socket in sockets), strict=True)
        assert set(addresses) <= set(LOOPBACK)
        assert f"{port:04X}" not in ports


def test_ranks_exchange_errors_and_values_and_run_no_pickle(
    outputs: list[list[str]], folder: Path
) -> None:
    seen = ["passed", "sum: 1 None", "stop: SIGTERM on rank 1"]
    seen += ["raised: rank 1 got no batch", "crash: no batch; killed"]
    path = f"PosixPath('{'ä' * 50}')"
    seen.append(f"gathered: [Entry(path=None, size=0.5)] [Entry(path={path}, size=inf)]")
    seen += ["from rank 0: rank 0", "folder: runs/0 True"]
    (*before, refusal), second = (lines[2:] for lines in outputs)
    assert second == before == seen
    assert refusal.startswith("refused: rank 1 sent b'\\x80"), "the beginning of a pickle"
    assert "no rank of this run" in refusal
    assert not (folder / "planted").exists(), "rank 1 fails at rank 0's JSON, before its own pickle"


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
