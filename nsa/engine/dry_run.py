"""A run that is built, tried for one step and described, and leaves nothing behind."""

from __future__ import annotations

import json

import torch

from nsa.data.source import SourceUnreachable
from nsa.engine.build import build_engine
from nsa.engine.config import RunConfig
from nsa.engine.data import open_data
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from nsa.engine.recipe import Plan
from nsa.engine.resolve import to_yaml
from nsa.engine.resume import weights_to_load
from nsa.engine.train_state import TrainState
from nsa.model import flops_per_token, parameter_count
from nsa.monitor.throughput import memory_gb


def dry_run(plan: Plan) -> None:
    """One step on random tokens; prints what the run would be, and writes nothing."""
    ranks = Ranks.from_environment()
    config = plan.config
    about_data = _try_data(config, ranks)
    device = start_ranks(ranks)
    ds_config = {key: value for key, value in plan.ds_config.items() if key != "tensorboard"}
    weights = weights_to_load(config)
    engine, notes = build_engine(config, ds_config, device, weights)
    shared = config.train.sequence_parallel
    for _ in range(config.train.accumulation):
        shape = (config.train.micro_batch, config.data.seq_len // shared)
        tokens = torch.randint(config.model.vocab_size, shape, device=device)
        loss = engine(tokens, labels=tokens.roll(-1, dims=1))
        engine.backward(loss)
        engine.step()
    if ranks.rank == 0:
        sequences = config.train.micro_batch * config.train.accumulation * ranks.world_size
        for note in [*plan.notes, *notes, *about_data]:
            print(note)
        print(f"# configuration ({plan.profile})\n{to_yaml(config)}")
        print(f"# DeepSpeed\n{json.dumps(ds_config, indent=2)}\n")
        flops = flops_per_token(config.model, config.data.seq_len)
        twin = flops_per_token(config.model, config.data.seq_len, dense_equivalent=True)
        print(f"parameters          {parameter_count(config.model):,}")
        print(f"FLOPs per token     {flops:,.0f} (dense twin: {twin:,.0f})")
        print(f"tokens per step     {sequences // shared * config.data.seq_len:,}")
        print(f"run folder          {plan.run_dir}")
        print(f"peak memory, rank 0 {memory_gb():.2f} GB after one step")
        print(f"loss                {loss.item():.4f} on random tokens")
    stop_ranks()


def _try_data(config: RunConfig, ranks: Ranks) -> list[str]:
    """What there is to say of the text; a hub that cannot be reached does not end a dry run."""
    try:
        data = open_data(config, ranks, TrainState())
    except SourceUnreachable as error:
        return [f"DATA NOT REACHED, and not checked: {error}"]
    data.close()
    return data.notes
