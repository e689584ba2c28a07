"""Runs on two ranks: DeepSpeed configs, each with checkpoints of the others.

Saves a checkpoint under each config and loads it under each other. Then looks where the
stages place weights. Prints a JSON object per row.
"""

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from nsa.checkpoint.saver import load_checkpoint
from nsa.checkpoint.state_file import read_state_file
from nsa.engine.build import initialise
from nsa.engine.ds_config import load_ds_config, resolve_ds_config
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from nsa.model import LanguageModel
from nsa.model.fused import are_adjacent
from tests.checkpoint.toy import save_once
from tests.engine.small import small
from tests.ranks import ROOT


def build(name: str, seed: int, **blocks: dict[str, Any]) -> Any:
    config = small("deepspeed" if "activation_checkpointing" in blocks else "reentrant")
    config.train.accumulation, config.train.learning_rate = 1, 1e-2
    torch.manual_seed(seed)
    source = ROOT / f"ds_configs/{name}.json"
    raw = load_ds_config(source) | blocks
    resolved = resolve_ds_config(raw, config, world_size=dist.get_world_size(), source=source.name)
    return initialise(LanguageModel(config.model), config, resolved)


def step(engine: Any, index: int) -> None:
    generator = torch.Generator().manual_seed(100 * index + dist.get_rank())
    ids = torch.randint(256, (1, 40), generator=generator)
    engine.backward(engine(ids, labels=ids))
    engine.step()


def weights(engine: Any) -> torch.Tensor:
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=hasattr(parameters[0], "ds_id")):
        return torch.cat([parameter.detach().float().flatten() for parameter in parameters])


def switch(folder: Path, pairs: list[list[str]]) -> None:
    saved, next_step = {}, {}
    for name in dict.fromkeys(source for source, _ in pairs):
        engine = build(name, seed=1)
        for index in range(3):
            step(engine, index)
        save_once(engine, folder / name, 3, {"step": 3})
        saved[name] = weights(engine)
        step(engine, 3)
        next_step[name] = weights(engine)
        print(json.dumps({"config": name, "optimizer": type(engine.optimizer).__name__}))
        engine.destroy()
    for source, target in pairs:
        engine = build(target, seed=2)
        row: dict[str, Any] = {"from": source, "to": target}
        try:
            state = read_state_file(folder / source / "step00000003")
            load_checkpoint(engine, state)
            assert state.train_state == {"step": 3}
            row["weights"] = bool(torch.equal(weights(engine), saved[source]))
            step(engine, 3)
            update = (next_step[source] - saved[source]).norm()
            row["next_step"] = float((weights(engine) - next_step[source]).norm() / update)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(row), flush=True)
        engine.destroy()


def joint_products(name: str) -> list[bool]:
    """Per product of several weights of the model: whether they are one view of memory."""
    engine = build(name, seed=1)
    step(engine, 0)
    products = []
    for block in engine.module.blocks:
        attention, mlp = block.attention, block.mlp
        products += [[attention.q, attention.k, attention.v, attention.gates], [mlp.gate, mlp.up]]
    weights = [[linear.weight for linear in linears] for linears in products]
    engine.destroy()
    return [are_adjacent(x, -(-sum(map(len, x)) // 8) * 8) for x in weights]


def main() -> None:
    start_ranks(Ranks.from_environment())
    switch(Path(sys.argv[1]), json.loads(sys.argv[2]))
    for name in ("zero1_pcie", "zero1_bf16acc", "zero2_pcie"):
        print(json.dumps({"layout": name, "adjacent": joint_products(name)}), flush=True)
    build("zero1_pcie", seed=1, activation_checkpointing={"cpu_checkpointing": True}).destroy()
    print(json.dumps({"cpu_checkpointing": deepspeed.checkpointing.CPU_CHECKPOINT}), flush=True)


if __name__ == "__main__":
    main()
    stop_ranks()
