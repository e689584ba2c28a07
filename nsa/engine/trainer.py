"""Trainer: one rank of a run, from a RunRequest to the end of training.

    prepare()   checkpoint, node checks, dataset                  no process group yet
    build()     process group, checks of all ranks, engine        writes the run's folder last
    train()     the training loop; close everything, however it ends

Cheap and likely failures come first. A run that prepare() or build() refuses leaves no folder.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nsa import checkpoint
from nsa.doctor.check import OK, Check
from nsa.engine import loop, node_preflight, resume
from nsa.engine.build import build_engine
from nsa.engine.consensus import Consensus, RunAborted
from nsa.engine.data import Data, open_data
from nsa.engine.folder_lock import FolderLock
from nsa.engine.loss_guard import LossGuard
from nsa.engine.observers import build_observers, write_final_report
from nsa.engine.peer_hosts import RankProcess, connect_hosts
from nsa.engine.process_group import Ranks, start_ranks, stop_ranks
from nsa.engine.run import Run
from nsa.engine.run_dir import record_run
from nsa.engine.run_request import RunRequest
from nsa.engine.shutdown import ShutdownMonitor
from nsa.engine.telemetry import RankTelemetry
from nsa.engine.train_state import TrainState
from nsa.gates import ladder, result
from nsa.model import flops_per_token, parameter_count
from nsa.monitor.health import HealthRecorder
from nsa.monitor.observer import Observer, RunInfo
from nsa.monitor.throughput import Throughput, peak_flops
from nsa.monitor.writer import BackgroundWriter


class Trainer:
    """One rank of a run; start() goes through the three phases."""

    request: RunRequest
    ranks: Ranks
    notes: list[str]  # for the log

    # Set by prepare().
    resume_from: Path | None  # a checkpoint
    weights: Path | None  # initial weights of a fresh run
    state: TrainState
    rank_state: dict[str, Any]  # what the checkpoint holds for this rank
    node_checks: list[Check]  # empty but on local rank 0
    data: Data

    # Set by build().
    device: torch.device
    consensus: Consensus
    processes: list[RankProcess]  # of all ranks
    telemetry: RankTelemetry
    engine: Any  # DeepSpeed's
    writers: list[BackgroundWriter]  # of the observers
    run_info: RunInfo
    run: Run

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        self.ranks = Ranks.from_environment()
        self.notes = list(request.notes)

    def start(self) -> None:
        """Prepare, build, train, and exit the process with code 0."""
        lock = FolderLock(self.request.run_dir) if self.ranks.rank == 0 else None
        try:
            self.prepare()
            try:
                self.build()
            except BaseException:
                self.data.close()
                raise
        except (ValueError, RunAborted):
            if lock is not None:
                lock.abandon()
            raise
        self.train()
        stop_ranks()

    def prepare(self) -> None:
        """Find the checkpoint, check the node and open the dataset."""
        request, ranks = self.request, self.ranks
        self.resume_from, notes = resume.find_checkpoint(request, ranks.world_size)
        self.notes += notes
        self.state, self.rank_state, self.weights = TrainState(), {}, None
        if self.resume_from is not None:
            self.state, self.rank_state = resume.read_state(self.resume_from, ranks)
        else:
            self.weights = resume.find_initial_weights(request.config)
        if self.weights is not None:
            self.notes.append(f"initial weights: {self.weights}")
        self._check_steps_left()
        self.node_checks = (
            node_preflight.check_node(request, self.state.step) if ranks.local_rank == 0 else []
        )
        self.data = open_data(
            request.config, ranks, self.state, self.rank_state.get("feed"), request.data_changed
        )

    def _check_steps_left(self) -> None:
        step, stop_step = self.state.step, self.request.stop_step
        finished = step == stop_step == self.request.config.train.steps  # but maybe not reported
        if step >= stop_step > 0 and not finished:
            raise ValueError(
                f"{self.request.run_dir}: already at step {step}, not below the requested stop at "
                f"{stop_step}; raise --until or --steps"
            )

    def build(self) -> None:
        """Join the process group, run the checks that need all ranks, build the engine."""
        self.device = start_ranks(self.ranks)
        config = self.request.config
        self.consensus = Consensus(config.data.timeout * config.train.accumulation)
        run_dir, self.processes = resume.agree_on_run(
            self.consensus, self.request.run_dir, self.resume_from
        )
        request = self.request = replace(self.request, run_dir=run_dir)
        self.telemetry = RankTelemetry(request, self.ranks, self.state)
        checks = node_preflight.check_ranks(request, self.device, self.node_checks)
        if self.resume_from is not None and request.universal:
            self.resume_from = resume.convert_to_universal(
                self.consensus, self.resume_from, self.ranks
            )
        self.engine, gradient_notes = build_engine(
            config, request.ds_config, self.device, self.weights
        )
        checks.append(
            Check("dry batch", OK, "forward and backward; one gradient for each parameter")
        )
        if self.resume_from is not None:
            checkpoint.load(self.engine, self.resume_from)
        # Nothing is refused from here on, so the run's folder may change.
        if self.ranks.rank == 0:
            record_run(request, [process.host for process in self.processes])
            result.record(run_dir, ladder.preflight(checks))
        dist.barrier()
        self.notes += [
            *node_preflight.preflight_notes(checks, request),
            *gradient_notes,
            *self.data.notes,
        ]
        self.run_info = self._describe_run()
        self.run = self._assemble_run()

    def _describe_run(self) -> RunInfo:
        request = self.request
        return RunInfo(
            run_dir=request.run_dir,
            name=request.recipe,
            profile=request.profile,
            total_steps=request.stop_step,
            start_step=self.state.step,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            parameters=parameter_count(request.config.model),
            flops_per_token=flops_per_token(request.config.model, request.config.data.seq_len),
            notes=self.notes,
        )

    def _assemble_run(self) -> Run:
        """Collect what the training loop works on."""
        request, config, device = self.request, self.request.config, self.device
        rank, run_dir = self.ranks.rank, request.run_dir
        self.writers, observers = build_observers(request, self.engine, self.telemetry.run_history)
        if rank == 0:
            self.telemetry.report_dtypes(self.engine, run_dir / "dtypes.txt")
        guard = LossGuard(config.train, device)
        if "guard" in self.rank_state:
            guard.restore(self.rank_state["guard"])
        observed = self.engine.module.sparse_layers() if config.monitor.health and rank == 0 else {}
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        return Run(
            config=config,
            engine=self.engine,
            data=self.data,
            consensus=self.consensus,
            shutdown=ShutdownMonitor(request.time_limit),
            state=self.state,
            stop_step=request.stop_step,
            gates=ladder.ladder(config.monitor.ladder, config.train.steps),
            run_dir=run_dir,
            ranks=self.ranks,
            device=device,
            saver=self._build_saver(observers),
            guard=guard,
            telemetry=self.telemetry,
            observers=observers,
            health=HealthRecorder(observed, config.model.attention.spec),
            throughput=Throughput(
                flops_per_token=self.run_info.flops_per_token,
                peak=peak_flops(gpu, config.train.precision),
                world_size=self.ranks.world_size,
            ),
        )

    def _build_saver(self, observers: Observer) -> checkpoint.Saver:
        loader = self.data.loader
        return checkpoint.Saver(
            self.engine,
            self.request.run_dir / "checkpoints",
            self.request.config.checkpoint,
            agree=self.consensus.raise_together,
            attachments=self.request.config_files(),
            tokenizer={"name": loader.tokenizer, "fingerprint": loader.tokenizer_fingerprint},
            on_saved=observers.on_checkpoint,
            on_failed=lambda error: observers.on_message(f"NOT SAVED, training continues: {error}"),
        )

    def train(self) -> None:
        """Train, and close everything that reports on the run, however it ends."""
        run = self.run
        hosts = [process.host for process in self.processes]
        run.shutdown.start()
        run.shutdown.watch(self.processes, connect_hosts(run.consensus, self.ranks.rank, hosts))
        status = "failed"
        try:
            run.observers.on_start(self.run_info)
            status = loop.train(run)
        except RunAborted:
            status = "no-go"  # `main` prints the reason
            raise
        except Exception as error:
            status = f"failed: {type(error).__name__}: {error}".partition("\n")[0][:200]
            out_of_memory = run.telemetry.memory.out_of_memory(error)
            if out_of_memory is not None:
                print(f"nsa: {out_of_memory}", file=sys.stderr, flush=True)
            raise
        finally:
            run.shutdown.stop_watching()
            run.observers.on_end(status)
            for writer in self.writers:
                writer.close()
            run.telemetry.close(status)
            run.data.close()
            if run.ranks.rank == 0 and run.config.monitor.report:
                write_final_report(run.run_dir)
