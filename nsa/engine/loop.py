"""The training loop.

    for each step:   fetch the micro-batches on all ranks, or stop on all ranks
                     set the learning rate
                     for each micro-batch: forward, backward, engine.step()
                     if DeepSpeed did not apply the step: skip it or abort
                     log, evaluate, save and judge a go/no-go gate when due

Observers cannot change the training. Between logged steps nothing here waits for the device, and
the only collectives are DeepSpeed's and a few bytes between CPUs (process_group.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nsa.checkpoint.saver import SaveFailed, Saver
from nsa.checkpoint.state_file import Checkpoint
from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Batch
from nsa.doctor.node import Check
from nsa.engine.config import RunConfig, learning_rate
from nsa.engine.data import Data
from nsa.engine.load_run import StoredRun
from nsa.engine.loss_guard import LossGuard
from nsa.engine.process_group import AllRanksError, CpuCollectives, Ranks, RunAborted
from nsa.engine.run_dir import FolderLock
from nsa.engine.run_request import RunRequest, TrainState
from nsa.engine.shutdown import Interrupted, ShutdownMonitor
from nsa.engine.teacher import Teacher
from nsa.engine.telemetry import Telemetry
from nsa.gates.criteria import GateInputs, judge
from nsa.gates.results import Gate, record_result
from nsa.model import flops_per_token
from nsa.monitor.artifacts import RankHistory, read_table
from nsa.monitor.environment import write_dtypes
from nsa.monitor.health import HealthRecorder
from nsa.monitor.memory import memory_gb
from nsa.monitor.observer import Observers, StepRecord
from nsa.monitor.outputs import METRICS_FILE, SELECTION_FILE
from nsa.monitor.throughput import Throughput


class Run:
    """State and parts of a run on one rank; nsa/engine/trainer.py sets them."""

    # Set by prepare(), without a process group.
    resume_from: Checkpoint | None = None
    weights: Path | None = None  # initial weights of a fresh run
    stored_teacher: StoredRun | None = None
    state: TrainState
    node_checks: list[Check]  # empty except on local rank 0
    data: Data

    # Set by build().
    device: torch.device
    collectives: CpuCollectives
    processes: list[tuple[str, int]]  # host and process id of each rank
    telemetry: Telemetry
    engine: Any  # DeepSpeed's
    teacher: Teacher | None = None  # of train.teacher
    observers: Observers  # none except on rank 0
    saver: Saver
    guard: LossGuard
    shutdown: ShutdownMonitor
    gates: list[Gate]
    health: HealthRecorder
    throughput: Throughput

    saved_step = 0  # of the newest checkpoint; 0: none

    def __init__(self, request: RunRequest, lock: FolderLock | None) -> None:
        self.request = request
        self.lock = lock  # of the run's folder; None except on rank 0
        self.ranks = Ranks.from_environment()
        self.notes = list(request.notes)  # for the log

    @property
    def config(self) -> RunConfig:
        return self.request.config


def train(run: Run) -> str:
    """Train to the stop step and save, also after an error that all ranks raise.

    Returns the status: "finished", "stopped at --until …", or "preempted" with the reason.
    """
    run.saved_step = run.state.step
    try:
        stop_reason = _train_steps(run)
    except (AllRanksError, RunAborted):
        _save(run)
        raise
    _save(run)
    if stop_reason is not None:
        return f"preempted: {stop_reason}; {run.request.resume_hint}"
    steps, total = run.state.step, run.config.train.steps
    if steps < total:
        return f"stopped at --until {steps or 'preflight'} of {total} steps; continue with --resume"
    return "finished"


def _train_steps(run: Run) -> str | None:
    """Run the remaining steps; return the reason for stopping early."""
    config, stop_step, first_step = run.config, run.request.stop_step, run.state.step + 1
    _judge_if_due(run)  # a run resumed at a gate's step is judged again
    while run.state.step < stop_step:
        step = run.state.step + 1
        evaluates = _is_due(step, config.train.eval_every, stop_step)
        judges = any(gate.step == step for gate in run.gates)
        log_due = step == 1 or _is_due(step, config.monitor.log_every, stop_step)
        logs = log_due or evaluates or judges
        run.telemetry.step_start(step)
        run.telemetry.enter("data")
        fetch = partial(run.data.step_batches, run.state.samples)
        stop_reason, batches, labels = fetch_on_all_ranks(run, fetch)
        if stop_reason is not None:
            return stop_reason
        if logs and run.state.step >= config.train.switch_step:
            run.health.arm()
        loss = train_step(run, batches, labels)
        run.telemetry.step_end(run.state)
        if step == first_step and run.ranks.rank == 0:  # the optimizer has its states now
            dtypes = run.request.run_dir / "dtypes.txt"
            write_dtypes(dtypes, run.engine.module, run.engine.optimizer)
        if not run.engine.was_step_applied():
            run.guard.handle_skipped_step(run.state.step, run.collectives, run.observers.on_message)
        run.throughput.step(run.config.tokens_per_step(run.ranks.world_size))
        if logs:
            _log(run, loss, evaluates)
        if step in (config.train.selector_steps, config.train.switch_step):
            run.observers.on_message(f"step {step}: attention is sparse from here on")
            run.throughput.flops_per_token = executed_flops(config, run.state.step)  # next step's
        if _is_due(step, config.checkpoint.every, stop_step) and step < stop_step:
            _save(run, required=False)
        _judge_if_due(run)
    return None


def _judge_if_due(run: Run) -> None:
    """Judge a go/no-go gate at the current step; raise RunAborted on all ranks if it is No-Go."""
    for gate in run.gates:
        if gate.step == run.state.step:
            with run.throughput.paused():
                histories = run.collectives.gather(run.telemetry.history(), RankHistory)
                no_go = _judge(run, gate, histories) if run.ranks.rank == 0 else None
                no_go = run.collectives.gather(no_go, str | None)[0]
            if no_go is not None:
                raise RunAborted(no_go)


def _judge(run: Run, gate: Gate, histories: list[RankHistory]) -> str | None:
    """Judge on rank 0 by the records of all ranks; return the reason of a No-Go."""
    run_dir = run.request.run_dir
    try:
        for history in histories:
            if history.problem:
                raise ValueError(f"rank {history.rank}: {history.problem}")
        inputs = GateInputs(
            step=gate.step,
            metrics=read_table(run_dir / METRICS_FILE),
            selection=read_table(run_dir / SELECTION_FILE),
            histories=histories,
            switch_step=run.config.train.switch_step,
            new_weights=run.config.train.start_from is None,
            on_gpu=run.device.type == "cuda",
        )
        decision = judge(gate, inputs, run.config.monitor.ladder)
        record_result(run_dir, decision)
    except Exception as error:  # the other ranks wait for the decision
        run.observers.on_message(f"go/no-go gate {gate.name} is NOT JUDGED: {error!r}")
        return None
    run.observers.on_message(decision.summary)
    return None if decision.go else decision.summary


def fetch_on_all_ranks(
    run: Run, fetch: Callable[[], list[Batch]]
) -> tuple[str | None, list[Batch], int]:
    """Return a reason to stop, the batches, and the sum of all ranks' label counts.

    Raise on all ranks if `fetch` raises on one.
    """
    error: ValueError | None = None
    batches: list[Batch] = []
    try:
        with run.shutdown.interruptible():
            batches = fetch()
    except Interrupted:
        pass  # the barrier stops all ranks
    except ValueError as raised:
        error = raised
    count = sum(batch.label_count or 0 for batch in batches)
    reason, labels = run.collectives.barrier(error, run.shutdown.reason, count)
    return reason, batches, labels


def train_step(run: Run, batches: list[Batch], labels: int) -> torch.Tensor:
    """Run one optimizer step; return the mean of this rank's losses, still on the device.

    DeepSpeed averages the gradients of micro-batches and ranks. Each loss is weighted by its number
    of labels over the mean number, `labels` / (micro-batches · ranks), so that each label of the
    step weighs the same.
    """
    engine, state, config = run.engine, run.state, run.config.train
    selector_only = set_phase(engine, run.config, state.step)
    lr = learning_rate(state.step, config)
    for group in engine.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)
    total = torch.zeros((), device=run.device)
    for micro_step, batch in enumerate(batches):
        batch = batch.to(run.device)
        run.telemetry.enter("forward", micro_step)
        extra = dict[str, Any]()
        if batch.label_count is not None:
            ranks = dist.get_world_size()
            extra["loss_weight"] = batch.label_count * len(batches) * ranks / max(1, labels)
        if selector_only:
            extra["selector_only"] = True
        elif run.teacher is not None:
            extra |= run.teacher.arguments(batch)
        loss = engine(batch.input_ids, labels=batch.labels, cu_seqlens=batch.cu_seqlens, **extra)
        run.telemetry.enter("backward", micro_step)
        engine.backward(run.guard.check(loss))
        run.telemetry.enter("step", micro_step)
        engine.step()  # updates the weights after the last micro-batch only
        total += loss.detach().float()
    state.step += 1
    state.samples += run.config.samples_per_step(run.ranks.world_size)
    state.tokens += run.config.tokens_per_step(run.ranks.world_size)
    state.skipped += not engine.was_step_applied()
    return total / config.accumulation


def set_phase(engine: Any, config: RunConfig, step: int) -> bool:
    """Prepare step `step`, counted from 0; return whether only the selector learns in it.

        train.selector_steps   of a converted model: dense attention, only the index learns
        train.dense_steps      of a new model: dense attention, all weights learn
        later steps            sparse attention, all weights learn

    Only the step decides the phase, so a run can be resumed in any.
    """
    train, model = config.train, engine.module
    if not (train.switch_step or train.selector_steps):
        return False
    selector_only = step < train.selector_steps
    model.set_dense(step < train.switch_step or selector_only)
    for group in engine.optimizer.param_groups:  # decay changes weights without a gradient
        group["weight_decay"] = 0.0 if selector_only else group["decay"]
    return selector_only


def executed_flops(config: RunConfig, step: int) -> float:
    """Return the FLOPs per token of step `step`, counted from 0, without recomputation.

    In the selector's steps the backward pass ends at the index: only the forward pass counts.
    """
    train = config.train
    dense = step < max(train.switch_step, train.selector_steps)
    flops = flops_per_token(config.model, config.data.seq_len, dense_equivalent=dense)
    return flops / 3 if step < train.selector_steps else flops


@torch.no_grad()
def evaluate(run: Run) -> tuple[float | None, list[dict[str, float]]]:
    """Return the mean loss of the validation samples; None if any rank has to stop.

    With a teacher, also return rows that compare the model with it, by position. Attention is dense
    in dense_steps, but sparse in selector_steps.
    """
    run.telemetry.enter("eval")
    teacher = run.teacher
    # From the first batch on [1, 2]: sum of losses, labels; with a teacher [buckets, 5]: the sum of
    # losses first, the labels last.
    sums = torch.zeros((), device=run.device, dtype=torch.float64)
    fetch = partial(run.data.validation.batches, run.ranks.rank)
    stop_reason, batches, _ = fetch_on_all_ranks(run, fetch)
    if stop_reason is not None:
        return None, []
    run.engine.eval()
    if run.state.step <= run.config.train.selector_steps:
        run.engine.module.set_dense(False)  # only sparse attention shows what the index learned
    try:
        for batch in batches:
            # DeepSpeed's launcher kills its ranks 30 seconds after a signal: leave time to save.
            stop_reason, _ = run.collectives.barrier(stop=run.shutdown.reason)
            if stop_reason is not None:
                return None, []
            batch = batch.to(run.device)
            forward = partial(run.engine, labels=batch.labels, cu_seqlens=batch.cu_seqlens)
            if teacher is None:
                loss, count = forward(batch.input_ids), (batch.labels != IGNORE_INDEX).sum()
                sums = sums + torch.stack((loss.double() * count, count.double()))[None]
            else:
                extra = teacher.arguments(batch) | {"divergence": True}
                sums = sums + teacher.by_position(forward(batch.input_ids, **extra), batch)
    finally:
        run.engine.train()
    dist.all_reduce(sums)
    total = sums.sum(0)
    return (total[0] / total[-1]).item(), [] if teacher is None else teacher.rows(sums)


def _log(run: Run, loss: torch.Tensor, evaluates: bool) -> None:
    layers = run.health.read()
    speed = run.throughput.read()
    dist.all_reduce(loss)
    mean_loss = (loss / dist.get_world_size()).item()
    run.telemetry.heartbeat.set_loss(mean_loss)
    val_loss = bits_per_byte = None
    versus_teacher: list[dict[str, float]] = []
    if evaluates:
        with run.throughput.paused():
            val_loss, versus_teacher = evaluate(run)
        run.telemetry.enter("idle")
    if val_loss is not None:
        bits_per_byte = val_loss / math.log(2) / run.data.validation.bytes_per_token
    fp16 = run.config.train.precision == "fp16"
    grad_norm = run.engine.get_global_grad_norm()
    run.observers.on_step(
        StepRecord(
            step=run.state.step,
            tokens=run.state.tokens,
            loss=mean_loss,
            val_loss=val_loss,
            bits_per_byte=bits_per_byte,
            lr=learning_rate(run.state.step - 1, run.config.train),
            grad_norm=None if grad_norm is None else float(grad_norm),
            memory_gb=memory_gb(),
            skipped_steps=run.state.skipped,
            loss_scale=getattr(run.engine.optimizer, "loss_scale", None) if fp16 else None,
            layers=layers,
            versus_teacher=versus_teacher,
            **speed,
        )
    )


def _save(run: Run, required: bool = True) -> None:
    """Save unless this step is saved already; a failure is only logged unless `required`."""
    if run.saved_step == run.state.step:
        return
    run.telemetry.enter("save")
    start = time.monotonic()
    try:
        with run.throughput.paused():
            folder = run.saver.save(run.state.step, asdict(run.state))
        run.saved_step = run.state.step
        pause = f"training paused for {time.monotonic() - start:.1f} s"
        run.observers.on_message(f"step {run.state.step}: saved {folder}, {pause}")
    except SaveFailed as error:
        if required:
            raise
        run.observers.on_message(f"NOT SAVED: {error}")
    run.telemetry.enter("idle")


def _is_due(step: int, every: int, stop_step: int) -> bool:
    """Return True every `every` steps (0: never) and at the last step."""
    return step == stop_step or bool(every and step % every == 0)
