"""A tiny DeepSpeed engine with every kind of state that a checkpoint must hold."""

from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from nsa.checkpoint.saver import CheckpointConfig, Saver
from nsa.engine.process_group import CpuCollectives

GROUPS = (lambda p: p.dim() > 1, lambda p: p.dim() == 1)  # with weight decay, and without


def build(seed: int, stage: int = 1, width: int = 64, **more: Any) -> Any:
    """Build an engine with two parameter groups, bf16 with fp32 accumulation as in production."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.LayerNorm(width), torch.nn.Linear(width, width)
    )
    groups = [
        {"params": list(filter(belongs, model.parameters())), "weight_decay": decay}
        for belongs, decay in zip(GROUPS, (0.01, 0.0), strict=True)
    ]
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 4 // dist.get_world_size(),
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 2**20},
        **more,
    }
    if stage == 1:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups, config=config, dist_init_required=False
    )
    return engine


def step(engine: Any, index: int) -> float:
    """Take one step on four samples, for any number of ranks; return their mean loss."""
    generator = torch.Generator().manual_seed(index)
    width = engine.module[0].in_features
    samples = torch.randn(4, width, generator=generator)
    per_rank = 4 // dist.get_world_size()
    mine = samples[dist.get_rank() * per_rank :][:per_rank].bfloat16()
    loss = (engine(mine).float() - mine.float().roll(1, dims=1)).square().mean()
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def weights(engine: Any) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in engine.module.parameters()])


def save_once(engine: Any, folder: Path, step: int, state: dict[str, Any]) -> None:
    """Save once; every rank must call it with the same step."""
    barrier = CpuCollectives(max_seconds=60).barrier
    saver = Saver(engine, folder, CheckpointConfig(), barrier=barrier)
    saver.save(step, state)
