"""Dry run: build everything, print a summary, run one step on random tokens; writes nothing."""

from __future__ import annotations

import json

import torch

from nsa.data.batches import Batch
from nsa.data.source import SourceUnreachable
from nsa.engine.build import build_engine
from nsa.engine.config import RunConfig
from nsa.engine.data import open_data
from nsa.engine.ds_config import TRACKERS
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from nsa.engine.resolve import to_yaml
from nsa.engine.resume import find_initial_weights
from nsa.engine.run_request import RunRequest
from nsa.engine.teacher import find_teacher, load_teacher
from nsa.engine.train_state import TrainState
from nsa.model import flops_per_token, parameter_count
from nsa.monitor.memory import memory_gb


def dry_run(request: RunRequest) -> None:
    """Run the dry run on this rank; rank 0 prints the summary."""
    ranks = Ranks.from_environment()
    config = request.config
    stored = find_teacher(config)
    data_notes = _check_data(config, ranks)
    device = start_ranks(ranks)
    weights = find_initial_weights(config)
    # A tracker would begin a run, or write into the working directory.
    ds_config = {name: block for name, block in request.ds_config.items() if name not in TRACKERS}
    engine = build_engine(config, ds_config, device, weights)
    teacher = None if stored is None else load_teacher(stored, config, engine.module, device)
    shape = (config.train.rows, config.data.seq_len // config.train.sequence_parallel)
    tokens_per_step = config.tokens_per_step(ranks.world_size)
    if ranks.rank == 0:
        for note in [*request.notes, *data_notes]:
            print(note)
        print(f"# configuration ({request.profile})\n{to_yaml(config)}")
        print(f"# DeepSpeed\n{json.dumps(request.ds_config, indent=2)}\n")
        flops = flops_per_token(config.model, config.data.seq_len)
        dense_flops = flops_per_token(config.model, config.data.seq_len, dense_equivalent=True)
        print(f"parameters          {parameter_count(config.model):,}")
        print(f"FLOPs per token     {flops:,.0f} (dense twin: {dense_flops:,.0f})")
        print(f"tokens per step     {tokens_per_step:,}")
        print(f"run folder          {request.run_dir}")
        print(f"taking one step of {tokens_per_step:,} tokens …", flush=True)
    for _ in range(config.train.accumulation):
        tokens = torch.randint(config.model.vocab_size, shape, device=device)
        batch = Batch(tokens, tokens.roll(-1, dims=1))
        more = {} if teacher is None else teacher.arguments(batch)
        loss = engine(batch.input_ids, labels=batch.labels, **more)
        engine.backward(loss)
        engine.step()
    if ranks.rank == 0:
        print(f"peak memory, rank 0 {memory_gb():.2f} GB after one step")
        print(f"loss                {loss.item():.4f} on random tokens")
    stop_ranks()


def _check_data(config: RunConfig, ranks: Ranks) -> list[str]:
    """Open the dataset and return its notes; an unreachable hub does not fail a dry run."""
    try:
        data = open_data(config, ranks, TrainState())
    except SourceUnreachable as error:
        return [f"DATA NOT REACHED, and not checked: {error}"]
    data.close()
    return data.notes
