"""A plan turned into a running thing: ranks, engine, data, observers, loop."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nsa import checkpoint
from nsa.data.source import Unreachable
from nsa.disk import atomic_write_text
from nsa.engine.agreement import Agreement
from nsa.engine.build import build_engine
from nsa.engine.config import RunConfig
from nsa.engine.data import open_data
from nsa.engine.loop import Run, train
from nsa.engine.ranks import Ranks, start_ranks, stop_ranks
from nsa.engine.recipe import Plan, with_run_dir, write_run_folder
from nsa.engine.state import TrainState
from nsa.model import flops_per_token, parameter_count
from nsa.monitor.gates import GateRecorder
from nsa.monitor.metrics_csv import MetricsCsv
from nsa.monitor.observer import Observer, Observers, RunInfo
from nsa.monitor.progress import Progress
from nsa.monitor.tensorboard import BackgroundMonitor, TensorBoardObserver
from nsa.monitor.throughput import Throughput, memory_gb, peak_flops
from nsa.monitor.writer import BackgroundWriter
from nsa.ops import fallback_counts


def start(plan: Plan) -> None:
    """Train as planned, on this rank."""
    ranks = Ranks.from_environment()
    found = checkpoint.newest(plan.run_dir / "checkpoints") if plan.resume else None
    state, rank_state = TrainState(), None
    if found is not None:
        state = TrainState.from_dict(checkpoint.saved_state(found))
        rank_state = checkpoint.saved_rank_state(found, ranks.rank)
    if state.step >= plan.stop:
        raise ValueError(
            f"{plan.run_dir} is already at step {state.step} and was asked to stop at "
            f"{plan.stop}; raise --until or --steps"
        )
    data = open_data(plan.config, ranks, state, rank_state, plan.new_data)
    device = start_ranks(ranks)
    plan = with_run_dir(plan, _agree(plan.run_dir))
    engine, notes = build_engine(plan.config, plan.ds_config, device)
    if found is not None:
        checkpoint.load(engine, found)
    elif plan.resume:
        notes.append("--resume: this run had saved no checkpoint; it starts at step 0")
    if ranks.rank == 0:
        write_run_folder(plan)  # only now: what was refused leaves the folder as it was
    dist.barrier()
    writers, observers = _observers(plan, engine)
    flops = flops_per_token(plan.config.model, plan.config.data.seq_len)
    throughput = Throughput(
        flops_per_token=flops, peak=_peak(plan.config, device), world_size=ranks.world_size
    )
    run = Run(
        config=plan.config,
        engine=engine,
        feed=data.feed,
        held_out=data.held_out,
        agreement=Agreement(plan.config.data.timeout * plan.config.train.accumulation),
        state=state,
        stop=plan.stop,
        run_dir=plan.run_dir,
        rank=ranks.rank,
        device=device,
        observers=observers,
        gates=GateRecorder(engine.module.gate_projections()),
        throughput=throughput,
    )
    info = RunInfo(
        run_dir=plan.run_dir,
        name=plan.recipe.name,
        profile=plan.profile,
        total_steps=plan.stop,
        start_step=state.step,
        rank=ranks.rank,
        world_size=ranks.world_size,
        parameters=parameter_count(plan.config.model),
        flops_per_token=flops,
        notes=[*plan.notes, *notes, *data.notes],
    )
    status = "failed"
    try:
        if ranks.rank == 0:
            observers.on_start(info)
        train(run)
        status = "finished"
    finally:
        if ranks.rank == 0:
            observers.on_end(status)
            _write_fallbacks(plan.run_dir)
        for writer in writers:
            writer.close()
        data.close()
    stop_ranks()


def dry_run(plan: Plan) -> None:
    """One step on random tokens; prints what the run would be, and writes nothing."""
    ranks = Ranks.from_environment()
    config = plan.config
    about_data = _try_data(config, ranks)
    device = start_ranks(ranks)
    ds_config = {key: value for key, value in plan.ds_config.items() if key != "tensorboard"}
    engine, notes = build_engine(config, ds_config, device)
    for _ in range(config.train.accumulation):
        shape = (config.train.micro_batch, config.data.seq_len)
        tokens = torch.randint(config.model.vocab_size, shape, device=device)
        loss = engine(tokens, labels=tokens.roll(-1, dims=1))
        engine.backward(loss)
        engine.step()
    if ranks.rank == 0:
        from nsa.engine.load import to_yaml

        tokens_per_step = config.train.micro_batch * config.train.accumulation * ranks.world_size
        for note in [*plan.notes, *notes, *about_data]:
            print(note)
        print(f"# configuration ({plan.profile})\n{to_yaml(config)}")
        print(f"# DeepSpeed\n{json.dumps(ds_config, indent=2)}\n")
        flops = flops_per_token(config.model, config.data.seq_len)
        twin = flops_per_token(config.model, config.data.seq_len, dense_equivalent=True)
        print(f"parameters          {parameter_count(config.model):,}")
        print(f"FLOPs per token     {flops:,.0f} (dense twin: {twin:,.0f})")
        print(f"tokens per step     {tokens_per_step * config.data.seq_len:,}")
        print(f"run folder          {plan.run_dir}")
        print(f"peak memory, rank 0 {memory_gb():.2f} GB after one step")
        print(f"loss                {loss.item():.4f} on random tokens")
    stop_ranks()


def _try_data(config: RunConfig, ranks: Ranks) -> list[str]:
    """What there is to say of the text; a hub that cannot be reached does not end a dry run."""
    try:
        data = open_data(config, ranks, TrainState())
    except Unreachable as error:
        return [f"DATA NOT REACHED, and not checked: {error}"]
    data.close()
    return data.notes


def _agree(run_dir: Path) -> Path:
    """Rank 0's folder: the others may have looked after it was made."""
    choice = [str(run_dir)]
    dist.broadcast_object_list(choice)
    return Path(choice[0])


def _observers(plan: Plan, engine: Any) -> tuple[list[BackgroundWriter], Observer]:
    """Who watches, each with a writer of its own; only rank 0 is ever told anything."""
    if dist.get_rank() != 0:
        return [], Observers([])
    monitor = plan.config.monitor
    writers: list[BackgroundWriter] = []
    observers: list[Observer] = []

    def writer(name: str) -> BackgroundWriter:
        writers.append(BackgroundWriter(name))
        return writers[-1]

    if monitor.tensorboard:
        engine.monitor = BackgroundMonitor(engine.monitor, writer("tensorboard"))
        observers.append(TensorBoardObserver(engine.monitor))
    if monitor.csv:
        observers.append(MetricsCsv(writer("metrics.csv")))
    if monitor.progress:
        observers.append(Progress(writer("progress")))
    return writers, Observers(observers)


def _write_fallbacks(run_dir: Path) -> None:
    """Which backends `auto` passed over in this process, why, and how often: never silently."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["operation", "backend", "reason", "calls"])
    for (operation, backend, reason), calls in sorted(fallback_counts().items()):
        rows.writerow([operation, backend, reason, calls])
    atomic_write_text(run_dir / "fallbacks.csv", text.getvalue())


def _peak(config: RunConfig, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), config.train.precision)
