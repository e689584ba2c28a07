"""Trainer: one rank of a run, from a RunRequest to the end of training.

    prepare()   checkpoint, node checks, dataset                  no process group yet
    build()     process group, checks of all ranks, engine        writes the run's folder last
    train()     the training loop; closes all parts, however it ends

Cheap checks, and those that often fail, come first. If prepare() or build() fails, only the token
cache stays on the disk. dry_run() builds the same engine, takes one step on random tokens and
writes nothing.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from nsa.checkpoint.commit import trial_commit
from nsa.checkpoint.saver import SaveFailed, Saver, load_checkpoint
from nsa.data.batches import Batch
from nsa.data.source import SourceUnreachable
from nsa.doctor.node import OK, WARN, Check, failures, kept_checkpoints, lines, node_checks, passed
from nsa.doctor.ranks import rank_checks
from nsa.engine import loop, resume
from nsa.engine.build import build_engine, gradient_check_tokens
from nsa.engine.checks import check_kernels_on_all_ranks
from nsa.engine.config import RunConfig, to_yaml
from nsa.engine.data import open_data
from nsa.engine.loop import Run
from nsa.engine.loss_guard import LossGuard
from nsa.engine.process_group import (
    AllRanksError,
    CpuCollectives,
    Ranks,
    RunAborted,
    crash,
    start_ranks,
    stop_ranks,
)
from nsa.engine.run_dir import FolderLock, record_run
from nsa.engine.run_request import RunRequest, TrainState
from nsa.engine.shutdown import ShutdownMonitor
from nsa.engine.teacher import check_tokenizer, find_teacher, load_teacher
from nsa.engine.telemetry import Telemetry, build_observers, trackers
from nsa.gates.criteria import preflight
from nsa.gates.results import record_result, schedule
from nsa.gpus import peak_flops
from nsa.model import flops_per_token, parameter_count
from nsa.monitor.health import HealthRecorder
from nsa.monitor.memory import memory_gb
from nsa.monitor.observer import warn
from nsa.monitor.throughput import Throughput
from nsa.report.report import write_report
from nsa.text import as_one_line


def start(request: RunRequest, lock: FolderLock | None) -> None:
    """Prepare, build and train on this rank; exit with code 0. Only rank 0 has a lock."""
    run = Run(request, lock)
    try:
        prepare(run)
        try:
            build(run)
        except BaseException:
            run.data.close()
            raise
    except (ValueError, RunAborted, OSError) as error:
        if lock is not None:
            lock.undo()
        if isinstance(error, OSError):
            raise as_one_line(error) from error
        raise
    try:
        train(run)
    except ValueError as error:
        if isinstance(error, AllRanksError | SaveFailed):
            raise
        crash(error)  # an error of one rank within a step: not the user's mistake
    stop_ranks()


def prepare(run: Run) -> None:
    """Find the checkpoint, check the node and open the dataset."""
    request, ranks = run.request, run.ranks
    if run.lock is not None:  # rank 0
        trial_commit(request.run_dir)
    run.resume_from, notes = resume.read_checkpoint(request, ranks.world_size)
    run.notes += notes
    run.state = TrainState()
    if run.resume_from is not None:
        run.state = resume.read_state(run.resume_from)
    else:
        run.weights = resume.find_initial_weights(request.config)
    if run.weights is not None:
        run.notes.append(f"initial weights: {run.weights}")
    _check_steps_left(request, run.state.step)
    run.stored_teacher = find_teacher(request.config)
    run.node_checks = _check_node(request, run.state.step) if ranks.local_rank == 0 else []
    run.data = open_data(request.config, ranks, run.state, request.run_dir, request.data_changed)


def _check_steps_left(request: RunRequest, step: int) -> None:
    if request.stop_step == 0 or step < request.stop_step:
        return
    # A finished run may be resumed: its last gate or report may be missing.
    if step == request.stop_step == request.config.train.steps:
        before, now = request.resumed_config, request.config
        if before and (before.model, before.data) != (now.model, now.data):
            raise ValueError(
                f"{request.run_dir}: already at its last step, {step}, so changing model.* or "
                "data.* does nothing; raise --steps, or resume without the change"
            )
    else:
        raise ValueError(
            f"{request.run_dir}: already at step {step}, not below the requested stop at "
            f"{request.stop_step}; raise --until or --steps"
        )


def _check_node(request: RunRequest, steps_done: int) -> list[Check]:
    config = request.config
    return node_checks(
        request.run_dir,
        parameters=parameter_count(config.model),
        checkpoints=kept_checkpoints(
            request.stop_step, config.checkpoint.every, config.checkpoint.keep, steps_done
        ),
        ranks=int(os.environ.get("LOCAL_SIZE", 1)),
    )


def build(run: Run) -> None:
    """Join the process group, run the checks that need all ranks, build the engine."""
    config = run.config
    check_tokenizer(run.stored_teacher, config, run.data.cache.stamps[0].tokenizer_fingerprint)
    run.device = start_ranks(run.ranks)
    run.collectives = CpuCollectives(config.data.timeout * config.train.accumulation)
    run_dir, run.processes = resume.agree_on_run(
        run.collectives, run.request.run_dir, run.request.checkpoint
    )
    request = run.request = replace(run.request, run_dir=run_dir)
    run.telemetry = Telemetry(request, run.ranks, run.state)
    checks = rank_checks(
        device=run.device,
        gather=run.collectives.gather,
        config="".join(request.config_files().values()),
        node_checks=run.node_checks,
    )
    if not passed(checks):
        raise RunAborted(f"preflight: {failures(checks)}")
    if run.resume_from is not None and request.universal:
        run.resume_from = resume.convert_to_universal(run.collectives, run.resume_from, run.ranks)
    kernels, kernel_rows = check_kernels_on_all_ranks(config, run.device, run.collectives)
    checks.append(kernels)
    ds_config = request.ds_config | trackers(request)
    if run.ranks.rank == 0:
        warn(f"gradient check: one backward pass of {gradient_check_tokens(config)} tokens")
    run.engine = build_engine(config, ds_config, run.device, run.weights)
    checks.append(Check("gradient check", OK, "one gradient for each parameter on every rank"))
    if run.stored_teacher is not None:
        run.teacher = load_teacher(run.stored_teacher, config, run.device)
        run.notes.append(f"teacher: {run.stored_teacher.weights_folder}")
    if run.resume_from is not None:
        load_checkpoint(run.engine, run.resume_from)
    # Nothing is refused from here on, so the run's folder may change.
    passed_gate = preflight(checks)
    if run.ranks.rank == 0:
        record_run(request, [host for host, _ in run.processes], kernel_rows)
        record_result(run_dir, passed_gate)
    dist.barrier()
    if request.stop_step == 0:  # --until preflight
        run.notes += [*lines(checks), passed_gate.summary]
    else:
        run.notes += lines([check for check in checks if check.status == WARN])
    run.notes += run.data.notes
    _create_parts(run)


def _create_parts(run: Run) -> None:
    """Create what the training loop calls, from the observers to the checkpoint saver."""
    request, config, device = run.request, run.config, run.device
    rank, world_size = run.ranks.rank, run.ranks.world_size
    run.observers = build_observers(request, run.engine, run.telemetry.csv_files)
    run.guard = LossGuard(config.train, device)
    run.shutdown = ShutdownMonitor(request.time_limit)
    run.gates = schedule(config.monitor.ladder, config.train.steps)
    layers = run.engine.module.sparse_layers() if config.monitor.health and rank == 0 else {}
    run.health = HealthRecorder(layers, config.model.attention.spec)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    run.throughput = Throughput(
        flops_per_token=loop.executed_flops(config, run.state.step),
        peak=peak_flops(gpu, config.train.precision),
        world_size=world_size,
    )
    stamp = run.data.cache.stamps[0]
    run.saver = Saver(
        run.engine,
        request.run_dir / "checkpoints",
        config.checkpoint,
        barrier=run.collectives.barrier,
        attachments=request.config_files(),
        tokenizer={"name": stamp.tokenizer, "fingerprint": stamp.tokenizer_fingerprint},
    )


def _heading(run: Run) -> str:
    request, count, first = run.request, parameter_count(run.config.model), run.state.step + 1
    parameters = f"{count / 1e6:.1f}M" if count >= 100_000 else f"{count:,}"
    steps = f"steps {first} to {request.stop_step}"
    if first > request.stop_step:
        steps = "no step to take"
    return (
        f"{request.recipe} ({request.profile}): {parameters} parameters, {steps} on "
        f"{run.ranks.world_size} rank{'s' * (run.ranks.world_size > 1)}, in {request.run_dir}"
    )


def train(run: Run) -> None:
    """Run the training loop; close observers, telemetry and data, however the loop ends."""
    run.shutdown.start(run.processes)
    try:
        run.observers.on_start(run.request.run_dir, run.state.step)
        for line in (_heading(run), *run.notes):
            run.observers.on_message(line)
        status = loop.train(run)
    except RunAborted:
        status = "no-go"  # `main` prints the reason
        raise
    except BaseException as error:  # KeyboardInterrupt too
        status = f"failed: {type(error).__name__}: {error}".partition("\n")[0][:200].rstrip(": ")
        if (out_of_memory := run.telemetry.memory.out_of_memory(error)) is not None:
            warn(out_of_memory)
        if run.saved_step and sys.version_info >= (3, 11):  # the traceback ends with this note
            error.add_note(run.request.resume_hint)
        raise
    finally:
        run.shutdown.stop_watching()
        run.observers.on_end(status)
        run.observers.close()
        if run.ranks.rank == 0:  # before the last heartbeat, which reports the end of the run
            try:
                write_report(run.request.run_dir, status)
            except Exception as error:
                warn(f"report.md not written: {error!r}")
        run.telemetry.close(status)
        run.data.close()


def dry_run(request: RunRequest) -> None:
    """Run the dry run on this rank; rank 0 prints the summary."""
    ranks = Ranks.from_environment()
    config = request.config
    stored_teacher = find_teacher(config)
    data_notes = _check_data(config, ranks)
    device = start_ranks(ranks)
    weights = resume.find_initial_weights(config)
    # W&B would start a run on its server, or write into the working directory.
    ds_config = {name: block for name, block in request.ds_config.items() if name != "wandb"}
    engine = build_engine(config, ds_config, device, weights)
    teacher = None if stored_teacher is None else load_teacher(stored_teacher, config, device)
    shape = (config.train.rows, config.data.seq_len)
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
        teacher_arguments = {} if teacher is None else teacher.arguments(batch)
        loss = engine(batch.input_ids, labels=batch.labels, **teacher_arguments)
        engine.backward(loss)
        engine.step()
    if ranks.rank == 0:
        print(f"peak memory, rank 0 {memory_gb():.2f} GB after one step")
        print(f"loss                {loss.item():.4f} on random tokens")
    stop_ranks()


def _check_data(config: RunConfig, ranks: Ranks) -> list[str]:
    """Open the dataset and return its notes; an unreachable hub does not fail a dry run."""
    with TemporaryDirectory() as folder:
        try:
            data = open_data(config, ranks, TrainState(), Path(folder) / "run")
        except SourceUnreachable as error:
            return [f"DATA NOT REACHED, and not checked: {error}"]
        data.close()
        return data.notes
