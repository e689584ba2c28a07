"""`python -m nsa.bench checkpoint`: how long training stands still while M7C is saved."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nsa.bench.measure import environment
from nsa.checkpoint import CheckpointConfig, Saver
from nsa.checkpoint.manifest import checkpoint_name
from nsa.model import LanguageModel, ModelConfig

DEEPSPEED = {
    "train_batch_size": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 1},
}
TOKENS = 256  # of the one step that fills the optimizer


def run(rounds: int, folder: str | None) -> dict[str, Any]:
    """Save in both ways by turns on one rank, print and return the seconds of each."""
    engine = _engine()
    result: dict[str, Any] = {"environment": environment(), "rounds": rounds}
    with tempfile.TemporaryDirectory(dir=folder) as made:
        times: dict[str, list[tuple[float, float]]] = {"foreground": [], "background": []}
        size = 0
        for step in range(1, rounds + 2):
            for name, taken in times.items():
                path = Path(made) / name
                taken.append(_save(engine, path, step, name == "background"))
                newest = path / checkpoint_name(step)
                size = sum(file.stat().st_size for file in newest.iterdir())
    result["gigabytes"] = size / 1e9
    for name, taken in times.items():
        stalls, wholes = zip(*taken[1:], strict=True)  # the first pays for memory and folders
        row = {"stall_s": statistics.median(stalls), "committed_s": statistics.median(wholes)}
        result[name] = row
        print(
            f"{name:10}  training stands still {row['stall_s']:.2f} s, committed after "
            f"{row['committed_s']:.2f} s"
        )
    ratio = result["background"]["stall_s"] / result["foreground"]["stall_s"]
    result["background_over_foreground"] = ratio
    print(f"{size / 1e9:.2f} GB; in the background {ratio:.2f} times the stall")
    dist.destroy_process_group()
    return result


def _save(engine: Any, folder: Path, step: int, background: bool) -> tuple[float, float]:
    """Seconds until training may go on, and until the checkpoint counts."""

    def agree(error: ValueError | None) -> None:
        if error is not None:
            raise error

    saver = Saver(engine, folder, CheckpointConfig(keep=1, background=background), agree=agree)
    start = time.perf_counter()
    saver.save(step, {"step": step}, None)
    stall = time.perf_counter() - start
    saver.finish()
    return stall, time.perf_counter() - start


def _engine() -> Any:
    """M7C after one step, alone: its optimizer holds everything that a run's does."""
    import deepspeed

    from nsa.engine.process_group import leave_out_shared_memory_op

    leave_out_shared_memory_op()
    os.environ.setdefault("LOCAL_RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), world_size=1, rank=0)
    deepspeed.init_distributed("gloo", verbose=False)
    model = LanguageModel(ModelConfig())
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=DEEPSPEED,
        dist_init_required=False,
    )
    ids = torch.randint(ModelConfig().vocab_size, (1, TOKENS))
    engine.backward(engine(ids, labels=ids))
    engine.step()
    return engine
