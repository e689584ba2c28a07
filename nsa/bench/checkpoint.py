"""`python -m nsa.bench checkpoint`: how long saving M7C stalls training.

Checkpoints are written below TMPDIR.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from nsa.bench.results import print_figures
from nsa.checkpoint import CheckpointConfig, Saver
from nsa.checkpoint.manifest import checkpoint_name
from nsa.engine import disable_shared_memory_op
from nsa.engine.build import initialise
from nsa.engine.config import RunConfig
from nsa.engine.consensus import Consensus
from nsa.model import LanguageModel, ModelConfig

DEEPSPEED = {
    "train_batch_size": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 1},
}
ROUNDS = 5  # checkpoints of each kind
TOKENS = 256  # of the one step that fills the optimizer's state


def run(_: object) -> dict[str, Any]:
    """Alternate foreground and background saves on one rank; print the seconds of each kind."""
    engine = _engine()
    result: dict[str, Any] = {"rounds": ROUNDS}
    times: dict[str, list[tuple[float, float]]] = {"foreground": [], "background": []}
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, ROUNDS + 2):
            for name, seconds in times.items():
                path = Path(folder) / name
                seconds.append(_save(engine, path, step, name == "background"))
                size = sum(file.stat().st_size for file in (path / checkpoint_name(step)).iterdir())
    result["gigabytes"] = size / 1e9
    for name, seconds in times.items():
        # The first save also allocates memory and creates folders.
        stall, committed = (statistics.median(x) for x in zip(*seconds[1:], strict=True))
        result[name] = {"stall_s": stall, "committed_s": committed}
    ratio = result["background"]["stall_s"] / result["foreground"]["stall_s"]
    result["background_over_foreground"] = ratio
    print_figures(result)
    dist.destroy_process_group()
    return result


def _save(engine: Any, folder: Path, step: int, background: bool) -> tuple[float, float]:
    """Seconds until training can continue, and until the checkpoint is committed."""
    config = CheckpointConfig(keep=1, background=background)
    saver = Saver(engine, folder, config, agree=Consensus(0).barrier)
    start = time.perf_counter()
    saver.save(step, {"step": step}, None)
    stall = time.perf_counter() - start
    saver.finish()
    return stall, time.perf_counter() - start


def _engine() -> Any:
    """M7C after one step on one rank: its optimizer has the state of a real run."""
    disable_shared_memory_op()
    os.environ.setdefault("LOCAL_RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), world_size=1, rank=0)
    deepspeed.init_distributed("gloo", verbose=False)
    model = LanguageModel(ModelConfig())
    engine = initialise(model, RunConfig(), DEEPSPEED)
    ids = torch.randint(ModelConfig().vocab_size, (1, TOKENS))
    engine.backward(engine(ids, labels=ids))
    engine.step()
    return engine
