"""The training loop, from top to bottom.

    for each step:   this step's micro-batches, on all ranks or on none
                     learning rate of this step
                     for each micro-batch:  forward, backward, engine.step()
                     evaluate, log, save when it is time

Observers hang on it and cannot change what it computes. Between logged steps nothing here waits
for the device. The only collectives are DeepSpeed's and a few bytes between processors, by which
ranks learn whether all of them have data; loss is averaged over ranks on logged steps, by every
rank.
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

from nsa import checkpoint
from nsa.data.batches import IGNORED, Batch
from nsa.data.feed import Feed, HeldOut
from nsa.engine.agreement import Agreement, AllRanksError
from nsa.engine.config import RunConfig
from nsa.engine.schedule import learning_rate
from nsa.engine.state import TrainState
from nsa.monitor.gates import GateRecorder
from nsa.monitor.observer import Observer, StepRecord
from nsa.monitor.throughput import Throughput, memory_gb


@dataclass
class Run:
    """Everything that training needs, built and checked."""

    config: RunConfig
    engine: Any  # DeepSpeed's
    feed: Feed
    held_out: HeldOut
    agreement: Agreement
    state: TrainState
    stop: int  # steps after which to stop; the schedule ends at config.train.steps
    run_dir: Path
    rank: int
    device: torch.device
    observers: Observer
    gates: GateRecorder
    throughput: Throughput
    place: dict[str, Any] | None = None  # of this rank in its text, behind the last step
    saved: int = 0  # the step that the newest checkpoint holds
    told: bool = False  # what there is to say of the held-out text


def train(run: Run) -> None:
    """Train from run.state.step to run.stop, saving at the end, also where that is an error's."""
    run.place, run.saved = run.feed.state(), run.state.step
    try:
        _train(run)
    except AllRanksError:
        if run.saved != run.state.step:
            _save(run)
        raise


def _train(run: Run) -> None:
    state, config = run.state, run.config
    first = state.step
    while state.step < run.stop:
        evaluates = _due(state.step + 1, config.train.eval_every, run.stop)
        logs = evaluates or _due(state.step + 1, config.monitor.log_every, run.stop)
        if state.step == 0:
            logs = True
        if logs:
            run.gates.arm()
        batches = next_batches(run)
        if state.step == first and run.rank == 0:
            seconds = run.feed.first_batch_seconds
            run.observers.on_message(f"first batch ready {seconds:.1f} s after the data was opened")
        loss = train_step(run, batches)
        run.place = run.feed.state()
        run.throughput.step(_tokens_per_step(run))
        if logs:
            gates = run.gates.read()
            _log(run, loss, gates, evaluates)
        if _due(state.step, config.checkpoint.every, run.stop):
            _save(run)
    if run.saved != state.step:
        _save(run)


def next_batches(run: Run) -> list[Batch]:
    """This step's micro-batches."""
    accumulation = run.config.train.accumulation
    return _on_all_ranks(run, lambda: [run.feed.take() for _ in range(accumulation)])


def _on_all_ranks(run: Run, get: Callable[[], list[Batch]]) -> list[Batch]:
    """What `get` returns; where it raises on one rank, its error on all of them."""
    error: ValueError | None = None
    batches: list[Batch] = []
    try:
        batches = get()
    except ValueError as raised:
        error = raised
    run.agreement.raise_together(error)
    return batches


def train_step(run: Run, batches: list[Batch]) -> torch.Tensor:
    """One optimizer step; returns this rank's mean loss, still on the device."""
    engine, state, config = run.engine, run.state, run.config.train
    rate = learning_rate(state.step, config)
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
    total = torch.zeros((), device=run.device)
    for batch in batches:
        if run.device.type == "cuda":
            batch = batch.pin_memory()  # else the copy would wait for the device
        batch = batch.to(run.device, non_blocking=True)
        loss = engine(batch.input_ids, labels=batch.labels, cu_seqlens=batch.cu_seqlens)
        engine.backward(loss)
        engine.step()  # after each micro-batch: DeepSpeed counts them and steps at the last
        total += loss.detach().float()
    state.step += 1
    state.samples += run.feed.samples_per_step
    state.tokens += _tokens_per_step(run)
    state.skipped += not engine.was_step_applied()
    return total / config.accumulation


@torch.no_grad()
def evaluate(run: Run) -> float:
    """The mean loss over the held-out samples: the same ones each time, however many the ranks."""
    total = torch.zeros(2, device=run.device, dtype=torch.float64)
    batches = _on_all_ranks(run, lambda: run.held_out.batches(run.rank))
    with _evaluating(run.engine):
        for batch in batches:
            batch = batch.to(run.device)
            loss = run.engine(batch.input_ids, labels=batch.labels, cu_seqlens=batch.cu_seqlens)
            count = (batch.labels != IGNORED).sum()
            total += torch.stack((loss.double() * count, count.double()))
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def _log(run: Run, loss: torch.Tensor, gates: dict[str, float], evaluates: bool) -> None:
    speed = run.throughput.read()
    validation = bits = None
    if evaluates:
        with run.throughput.paused():
            validation = evaluate(run)
        bits = validation / math.log(2) / run.held_out.bytes_per_token
        if run.rank == 0 and run.held_out.note and not run.told:
            run.observers.on_message(run.held_out.note)
            run.told = True
    norm = run.engine.get_global_grad_norm()
    record = StepRecord(
        step=run.state.step,
        tokens=run.state.tokens,
        loss=_mean_over_ranks(loss),
        val_loss=validation,
        bits_per_byte=bits,
        lr=learning_rate(run.state.step - 1, run.config.train),
        grad_norm=None if norm is None else float(norm),
        tokens_per_s=speed.tokens_per_s,
        mfu=speed.mfu,
        memory_gb=memory_gb(),
        seconds=speed.seconds,
        skipped_steps=run.state.skipped,
        gates=gates,
    )
    if run.rank == 0:
        run.observers.on_step(record)


def _save(run: Run) -> None:
    with run.throughput.paused():
        path = checkpoint.save(
            run.engine,
            run.run_dir / "checkpoints",
            run.state.step,
            run.state.to_dict(),
            run.place,
        )
    run.saved = run.state.step
    if run.rank == 0:
        run.observers.on_checkpoint(run.state.step, path)


def _tokens_per_step(run: Run) -> int:
    return run.feed.samples_per_step * run.config.data.seq_len


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
