"""A plan turned into a running thing: ranks, engine, data, observers, loop."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nsa import checkpoint
from nsa.doctor.check import Check
from nsa.doctor.command import dry_batch_check
from nsa.engine.build import build_engine
from nsa.engine.config import RunConfig
from nsa.engine.consensus import Consensus
from nsa.engine.data import Data, open_data
from nsa.engine.folder_lock import FolderLock
from nsa.engine.loop import Run, train
from nsa.engine.loss_guard import Guard, RunAborted
from nsa.engine.node_preflight import check_node, check_ranks, notes_of
from nsa.engine.observers import build_observers, report, start_telemetry
from nsa.engine.peer_hosts import connect_hosts
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from nsa.engine.recipe import Plan, run_files, with_run_dir, write_run_folder
from nsa.engine.resume import (
    Place,
    agree_on,
    checkpoint_to_load,
    convert,
    saved_in,
    weights_to_load,
)
from nsa.engine.shutdown import ShutdownMonitor
from nsa.engine.telemetry import RankTelemetry
from nsa.engine.train_state import TrainState
from nsa.gates import ladder
from nsa.model import flops_per_token, parameter_count
from nsa.monitor.health import HealthRecorder
from nsa.monitor.observer import Observer, RunInfo
from nsa.monitor.throughput import Throughput, peak_flops
from nsa.monitor.writer import BackgroundWriter


@dataclass
class Begun:
    """A run that nothing refuses any more, and who is told of it."""

    run: Run
    info: RunInfo
    places: list[Place]  # of the ranks


def start(plan: Plan) -> None:
    """Train as planned, on this rank."""
    ranks = Ranks.from_environment()
    lock = FolderLock(plan.run_dir) if ranks.rank == 0 else None
    try:
        begun = _prepare(plan, ranks)
    except (ValueError, RunAborted):
        if lock is not None:
            lock.abandon()  # what was refused leaves no folder behind
        raise
    _train(begun)
    stop_ranks()


def _prepare(plan: Plan, ranks: Ranks) -> Begun:
    """Build and check everything, what is cheap and likely to fail first."""
    found, notes = checkpoint_to_load(plan, ranks)
    weights = weights_to_load(plan.config) if found is None else None
    if weights is not None:
        notes = [*notes, f"begins with the weights of {weights}"]
    state, own = TrainState(), dict[str, Any]()
    if found is not None:
        state, own = saved_in(found, ranks.rank, ranks.world_size)
    whole = plan.stop == plan.config.train.steps == state.step  # ended before it could say so
    if state.step >= plan.stop > 0 and not whole:
        raise ValueError(
            f"{plan.run_dir} is already at step {state.step} and was asked to stop at "
            f"{plan.stop}; raise --until or --steps"
        )
    machine = check_node(plan, state.step) if ranks.local_rank == 0 else []
    data = open_data(plan.config, ranks, state, own.get("feed"), plan.new_data)
    try:
        begun = _build(plan, ranks, found, weights, state, data, machine, notes)
    except BaseException:
        data.close()
        raise
    if "guard" in own:
        begun.run.guard.restore(own["guard"])
    return begun


def _build(
    plan: Plan,
    ranks: Ranks,
    found: Path | None,
    weights: Path | None,
    state: TrainState,
    data: Data,
    machine: list[Check],
    notes: list[str],
) -> Begun:
    """Join the ranks, check what only they know together, and make the engine."""
    device = start_ranks(ranks)
    run_dir, places = agree_on(plan.run_dir, found)
    plan = with_run_dir(plan, run_dir)
    instruments = start_telemetry(plan, ranks, state)
    checks = check_ranks(plan, device, machine)
    if found is not None:
        found = convert(found, plan, ranks)
    engine, tolerated = build_engine(plan.config, plan.ds_config, device, weights)
    checks.append(dry_batch_check("forward and backward; each parameter got its gradient once"))
    if found is not None:
        checkpoint.load(engine, found)
    if ranks.rank == 0:
        write_run_folder(
            plan, [host for host, _ in places]
        )  # only now: what was refused leaves the folder as it was
        ladder.record(plan.run_dir, ladder.preflight(checks))
    dist.barrier()
    writers, observers = build_observers(plan, engine)
    instruments.listen(engine, plan.run_dir, ranks.rank)
    info = RunInfo(
        run_dir=plan.run_dir,
        name=plan.recipe.name,
        profile=plan.profile,
        total_steps=plan.stop,
        start_step=state.step,
        rank=ranks.rank,
        world_size=ranks.world_size,
        parameters=parameter_count(plan.config.model),
        flops_per_token=flops_per_token(plan.config.model, plan.config.data.seq_len),
        notes=[*plan.notes, *notes, *notes_of(checks, plan), *tolerated, *data.notes],
    )
    run = _assemble(plan, info, device, engine, data, state, instruments, observers, writers)
    return Begun(run, info, places)


def _assemble(
    plan: Plan,
    info: RunInfo,
    device: torch.device,
    engine: Any,
    data: Data,
    state: TrainState,
    instruments: RankTelemetry,
    observers: Observer,
    writers: list[BackgroundWriter],
) -> Run:
    """Everything that the loop needs, in one place."""
    config = plan.config
    agreement = Consensus(config.data.timeout * config.train.accumulation)
    saver = checkpoint.Saver(
        engine,
        plan.run_dir / "checkpoints",
        config.checkpoint,
        agree=agreement.raise_together,
        attachments=run_files(plan),
        tokenizer={"name": data.loader.tokenizer, "fingerprint": data.loader.tokenizer_fingerprint},
        on_saved=observers.on_checkpoint,
        on_failed=lambda error: observers.on_message(f"NOT SAVED, training goes on: {error}"),
    )
    told = info.rank == 0 and config.monitor.health and config.model.attention.kind == "nsa"
    return Run(
        config=config,
        engine=engine,
        data=data,
        agreement=agreement,
        stopping=ShutdownMonitor(plan.time_limit),
        state=state,
        stop=plan.stop,
        gates=ladder.ladder(config.monitor.ladder, config.train.steps),
        run_dir=plan.run_dir,
        rank=info.rank,
        ranks=info.world_size,
        device=device,
        saver=saver,
        guard=Guard(config.train, device),
        instruments=instruments,
        observers=observers,
        writers=writers,
        health=HealthRecorder(
            engine.module.sparse_layers() if told else {}, config.model.attention.spec
        ),
        throughput=Throughput(
            flops_per_token=info.flops_per_token,
            peak=_peak(config, device),
            world_size=info.world_size,
        ),
    )


def _train(begun: Begun) -> None:
    """Train, and leave nothing untold whatever ends it."""
    run = begun.run
    run.stopping.install()
    run.stopping.watch_neighbours(dict(enumerate(begun.places)))
    hosts = [host for host, _ in begun.places]
    run.stopping.watch_hosts(connect_hosts(run.agreement, run.rank, hosts))
    status = "failed"
    try:
        run.observers.on_start(begun.info)
        status = train(run)
    except RunAborted:
        status = "no-go"  # the reason is said once, at the end
        raise
    except Exception as error:
        status = f"failed: {type(error).__name__}: {error}".partition("\n")[0][:200]
        said = run.instruments.memory.out_of_memory(error)
        if said is not None:
            print(f"nsa: {said}", file=sys.stderr, flush=True)
        raise
    finally:
        run.stopping.end()
        run.observers.on_end(status)
        for writer in run.writers:
            writer.close()
        run.instruments.close(status)
        run.data.close()
        report(run.config, run.run_dir, run.rank)


def _peak(config: RunConfig, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), config.train.precision)
