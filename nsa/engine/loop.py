"""The training loop, from top to bottom.

    for each step:   this step's micro-batches, on all ranks or on none; none where one is to stop
                     learning rate of this step
                     for each micro-batch:  forward, backward, engine.step()
                     a step that DeepSpeed did not apply: go on, go back, or end
                     evaluate, log, save, judge when it is time

Observers hang on it and cannot change what it computes. Between logged steps nothing here waits
for the device. The only collectives are DeepSpeed's and a few bytes between processors, by which
ranks learn whether all of them have data and go on; loss is averaged over ranks on logged steps,
by every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nsa.checkpoint import SaveFailed, Saver
from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Batch
from nsa.engine.config import RunConfig
from nsa.engine.consensus import AllRanksError, Consensus
from nsa.engine.data import Data
from nsa.engine.gates import judge
from nsa.engine.loss_guard import Guard, RunAborted
from nsa.engine.recovery import recover
from nsa.engine.schedule import learning_rate
from nsa.engine.shutdown import Interrupted, ShutdownMonitor
from nsa.engine.telemetry import RankTelemetry
from nsa.engine.train_state import TrainState
from nsa.gates.ladder import Gate
from nsa.monitor.health import HealthRecorder
from nsa.monitor.observer import Observer, StepRecord
from nsa.monitor.throughput import Throughput, memory_gb
from nsa.monitor.writer import BackgroundWriter


@dataclass
class Run:
    """Everything that training needs, built and checked."""

    config: RunConfig
    engine: Any  # DeepSpeed's
    data: Data
    agreement: Consensus
    stopping: ShutdownMonitor
    state: TrainState
    stop: int  # steps after which to stop; the schedule ends at config.train.steps
    gates: list[Gate]  # where the run is judged
    run_dir: Path
    rank: int
    ranks: int
    device: torch.device
    saver: Saver
    guard: Guard
    instruments: RankTelemetry
    observers: Observer
    writers: list[BackgroundWriter]  # of the observers
    health: HealthRecorder
    throughput: Throughput
    place: dict[str, Any] | None = None  # of this rank in its text, behind the last step
    saved: int = 0  # the step that the newest checkpoint holds
    bad_steps: int = 0  # since the start
    told: bool = False  # what there is to say of the held-out text


def train(run: Run) -> str:
    """Train from run.state.step to run.stop, saving at the end, also where that is an error's.

    Returns how it ended: "finished", or "preempted" with the reason.
    """
    run.place, run.saved = run.data.loader.state(), run.state.step
    try:
        stopped = _train(run)
    except (AllRanksError, RunAborted):
        _save(run)
        raise
    _save(run)
    return "finished" if stopped is None else f"preempted: {stopped}"


def _train(run: Run) -> str | None:
    """Take the steps that are left; returns why the last ones were not taken, if so."""
    state, config = run.state, run.config
    first = state.step
    _judge_if_due(run)  # a No-Go that this run was resumed from holds as long as its reason does
    while state.step < run.stop:
        evaluates = _due(state.step + 1, config.train.eval_every, run.stop)
        logs = evaluates or _due(state.step + 1, config.monitor.log_every, run.stop)
        if state.step == 0 or any(gate.step == state.step + 1 for gate in run.gates):
            logs = True
        run.instruments.step_start(state.step + 1)
        stopped, batches = next_batches(run)
        if stopped is not None:
            return stopped
        if state.step == first and run.rank == 0:
            seconds = run.data.loader.first_batch_seconds
            run.observers.on_message(f"first batch ready {seconds:.1f} s after the data was opened")
        if logs:
            run.health.arm()
        loss = train_step(run, batches)
        run.place = run.data.loader.state()
        run.instruments.step_end(state)
        if not run.engine.was_step_applied():
            recover(run)
            if state.step != run.state.step:  # it went back
                state = run.state
                continue
        run.throughput.step(_tokens_per_step(run))
        if logs:
            _log(run, loss, evaluates)
        if _due(state.step, config.checkpoint.every, run.stop) and state.step < run.stop:
            _save(run, must=False)
        _judge_if_due(run)
    return None


def _judge_if_due(run: Run) -> None:
    for gate in run.gates:
        if gate.step == run.state.step:
            judge(run, gate)


def next_batches(run: Run) -> tuple[str | None, list[Batch]]:
    """This step's micro-batches; none, with the reason, where a rank is to stop."""
    run.instruments.enter("data")

    def take() -> list[Batch]:
        while run.state.samples in run.state.passed_over:
            _take_step(run)
            run.state.samples += run.data.loader.samples_per_step
        return _take_step(run)

    return _on_all_ranks(run, take)


def _take_step(run: Run) -> list[Batch]:
    return [run.data.next_batch() for _ in range(run.config.train.accumulation)]


def _on_all_ranks(run: Run, get: Callable[[], list[Batch]]) -> tuple[str | None, list[Batch]]:
    """What `get` returns, or why to stop; where it raises on one rank, its error on all of them."""
    error: ValueError | None = None
    batches: list[Batch] = []
    try:
        with run.stopping.may_interrupt():
            batches = get()
    except Interrupted:
        pass
    except ValueError as raised:
        error = raised
    return run.agreement.meet(error, run.stopping.reason), batches


def train_step(run: Run, batches: list[Batch]) -> torch.Tensor:
    """One optimizer step; returns this rank's mean loss, still on the device."""
    engine, state, config = run.engine, run.state, run.config.train
    rate = learning_rate(state.step, config)
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
    total = torch.zeros((), device=run.device)
    for micro_step, batch in enumerate(batches):
        run.instruments.enter("forward", micro_step)
        if run.device.type == "cuda":
            batch = batch.pin_memory()  # else the copy would wait for the device
        batch = batch.to(run.device, non_blocking=True)
        loss = engine(batch.input_ids, labels=batch.labels, cu_seqlens=batch.cu_seqlens)
        run.instruments.enter("backward", micro_step)
        engine.backward(run.guard.watch(loss))
        run.instruments.enter("step", micro_step)
        engine.step()  # after each micro-batch: DeepSpeed counts them and steps at the last
        total += loss.detach().float()
    state.step += 1
    state.samples += run.data.loader.samples_per_step
    state.tokens += _tokens_per_step(run)
    state.skipped += not engine.was_step_applied()
    return total / config.accumulation


@torch.no_grad()
def evaluate(run: Run) -> float | None:
    """The mean loss over the held-out samples: the same ones each time, however many the ranks.

    None where a rank is to stop before it has them.
    """
    run.instruments.enter("eval")
    total = torch.zeros(2, device=run.device, dtype=torch.float64)
    stopped, batches = _on_all_ranks(run, run.data.validation_batches)
    if stopped is not None:
        return None
    with _evaluating(run.engine):
        for batch in batches:
            batch = batch.to(run.device)
            loss = run.engine(batch.input_ids, labels=batch.labels, cu_seqlens=batch.cu_seqlens)
            count = (batch.labels != IGNORE_INDEX).sum()
            total += torch.stack((loss.double() * count, count.double()))
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def _log(run: Run, loss: torch.Tensor, evaluates: bool) -> None:
    health = run.health.read()
    speed = run.throughput.read()
    mean = _mean_over_ranks(loss)
    run.instruments.heartbeat.logged(mean)
    _tell_of_spikes(run)
    validation = bits = None
    if evaluates:
        with run.throughput.paused():
            validation = evaluate(run)
        run.instruments.enter("idle")
    if validation is not None:
        bits = validation / math.log(2) / run.data.validation.bytes_per_token
        if run.rank == 0 and run.data.validation.note and not run.told:
            run.observers.on_message(run.data.validation.note)
            run.told = True
    norm = run.engine.get_global_grad_norm()
    record = StepRecord(
        step=run.state.step,
        tokens=run.state.tokens,
        loss=mean,
        val_loss=validation,
        bits_per_byte=bits,
        lr=learning_rate(run.state.step - 1, run.config.train),
        grad_norm=None if norm is None else float(norm),
        tokens_per_s=speed.tokens_per_s,
        mfu=speed.mfu,
        memory_gb=memory_gb(),
        seconds=speed.seconds,
        skipped_steps=run.state.skipped,
        gates=health.gates if health is not None else {},
        health=health,
    )
    if run.rank == 0:
        run.observers.on_step(record)


def _tell_of_spikes(run: Run) -> None:
    """Spikes that train.on_spike only warns of; of others `recover` speaks."""
    spikes = run.guard.take().spikes
    if spikes and run.rank == 0:
        run.observers.on_message(
            f"step {run.state.step}: {spikes} losses of rank 0 since the last logged step were far "
            f"above the recent ones (train.spike_score = {run.config.train.spike_score})"
        )


def _save(run: Run, must: bool = True) -> None:
    """Save this step if it is not; where that fails the run goes on, unless it `must` be saved."""
    if run.saved != run.state.step:
        run.instruments.enter("save")
        try:
            with run.throughput.paused():
                own = {"feed": run.place, "guard": run.guard.state()}
                run.saver.save(run.state.step, run.state.to_dict(), own)
            run.saved = run.state.step
        except SaveFailed as error:
            if must:
                raise
            if run.rank == 0:
                run.observers.on_message(f"NOT SAVED, training goes on: {error}")
        run.instruments.enter("idle")
    if must:
        run.saver.finish()


def _tokens_per_step(run: Run) -> int:
    return run.data.loader.samples_per_step * run.config.data.seq_len


def _due(step: int, every: int, stop: int) -> bool:
    """Every so many steps, and at the last one; `every` 0 is the last one only."""
    return step == stop or bool(every and step % every == 0)


def _mean_over_ranks(value: torch.Tensor) -> float:
    value = value.clone()
    dist.all_reduce(value)
    return (value / dist.get_world_size()).item()


@contextmanager
def _evaluating(engine: Any) -> Iterator[None]:
    engine.eval()
    try:
        yield
    finally:
        engine.train()
