"""Checkpoint saver: the steps of a save on each rank, some of them while training continues.

    save    the draft is created        rank 0           \\
            DeepSpeed's state captured  every rank        |  training thread; all ranks
            and written, or copied to   every rank        |  continue, or all raise the
            host memory                                  /   same error
            files synced and hashed     every rank       \\  a thread of each rank;
            manifest, rename, latest    rank 0            |  `finish`, or the next `save`,
            old checkpoints removed     rank 0           /   waits for it
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nsa.checkpoint.commit import (
    commit,
    draft_of,
    new_draft,
    prune,
    remove_drafts,
    wait_for_parts,
    write_errors,
    write_failure,
    write_part,
)
from nsa.checkpoint.engine_state import (
    all_finite,
    capture,
    copy_to_host,
    engine_topology,
    rng_state,
    write_file,
)
from nsa.checkpoint.manifest import checkpoint_name, complete_by_size, rng_file
from nsa.checkpoint.state_file import STATE, SavedState, rank_file
from nsa.text import first_line
from nsa.validation import at_least

RECOVERY_SCRIPT = "zero_to_fp32.py"  # of DeepSpeed; gathers weights without an engine


@dataclass
class CheckpointConfig:
    """The `checkpoint` section of a run's settings; the last step is always saved."""

    every: int = 5_000  # steps between two checkpoints; 0: only at the end
    keep: int = 0  # number of newest checkpoints to keep; 0: all
    keep_hours: float = 0.0  # remove checkpoints older than this, never the newest; 0: none
    background: bool = False  # copy to host memory, and write while training continues

    def validate(self) -> None:
        at_least(0, "checkpoint", self, "every", "keep", "keep_hours")


class SaveFailed(ValueError):
    """A checkpoint that was not saved. All ranks raise it together, and training can continue."""


@dataclass
class _Job:
    """A checkpoint that a thread is writing."""

    step: int
    draft: Path
    files: dict[str, Any]  # not yet written, by name: objects for torch.save, or text
    names: list[str]  # of all files of this rank
    finite: bool
    stall: float = 0.0  # seconds that training waited
    part_done: threading.Event = field(default_factory=threading.Event)
    abort: threading.Event = field(default_factory=threading.Event)
    part_error: ValueError | None = None
    commit_error: ValueError | None = None
    failure_reported: bool = False
    thread: threading.Thread | None = None


@dataclass(eq=False)
class Saver:
    """Saves one engine into one folder. Every rank has one and calls it at the same steps.

    `barrier` takes this rank's error or None, waits for all ranks, and raises on all of them if one
    had an error. `tokenizer` holds name and fingerprint of the dataset's tokenizer, to use a
    checkpoint without the dataset. On rank 0, `on_saved` receives step, folder and the seconds that
    training waited, and `on_failed` an error that comes after `save` has returned. Both are called
    from the saver's thread; `on_failed` also from `finish`.
    """

    engine: Any
    folder: Path
    config: CheckpointConfig
    _: KW_ONLY
    barrier: Callable[[ValueError | None], object]
    attachments: Mapping[str, str] = field(default_factory=dict)  # texts by file name
    tokenizer: Mapping[str, str] | None = None
    on_saved: Callable[[int, Path, float], None] = lambda step, folder, stall: None
    on_failed: Callable[[SaveFailed], None] = lambda error: warnings.warn(str(error), stacklevel=2)

    def __post_init__(self) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._job: _Job | None = None
        if self._rank == 0:
            remove_drafts(self.folder)

    def save(self, step: int, state: dict[str, Any], rank_state: dict[str, Any] | None) -> None:
        """Save the engine, `state` (the same on all ranks) and `rank_state` (of this rank).

        Wait for the previous save first; its failure goes to `on_failed`. Raise SaveFailed if the
        files of this one cannot be written.
        """
        start = time.monotonic()
        with contextlib.suppress(SaveFailed):
            self.finish()
        draft = draft_of(self.folder, step)
        self._on_all_ranks(step, lambda: self._rank == 0 and new_draft(self.folder, step))
        files = capture(self.engine, draft)
        finite = all_finite(files)
        files[rng_file(self._rank)] = rng_state()
        if rank_state is not None:
            files[rank_file(self._rank)] = json.dumps(rank_state) + "\n"
        if self._rank == 0:
            topology = engine_topology(self.engine)
            files[STATE] = SavedState(draft, state, topology, self.tokenizer).to_json()
            files.update(self.attachments)
        job = _Job(step, draft, files, list(files), finite)
        self._on_all_ranks(step, lambda: self._capture(job))
        job.stall = time.monotonic() - start
        job.thread = threading.Thread(target=self._work, args=[job], name="checkpoint", daemon=True)
        job.thread.start()
        self._job = job

    def finish(self) -> None:
        """Wait until the last save is a checkpoint; raise SaveFailed on every rank if it failed."""
        job, self._job = self._job, None
        if job is None:
            return
        assert job.thread is not None
        job.part_done.wait()
        try:
            self.barrier(job.part_error)
            job.thread.join()
            self.barrier(job.commit_error)
        except ValueError as error:
            job.abort.set()
            job.thread.join()
            failure = self._failure(job.step, error)
            self._report_failure(job, failure)
            raise failure from error
        finally:
            if self._rank == 0:
                shutil.rmtree(job.draft, ignore_errors=True)

    def _on_all_ranks(self, step: int, action: Callable[[], object]) -> None:
        """Run an action on every rank; if it fails on any, raise SaveFailed on all."""
        failed: ValueError | None = None
        try:
            with write_errors(draft_of(self.folder, step)):
                action()
        except ValueError as error:
            failed = error
        try:
            self.barrier(failed)
        except ValueError as error:
            if self._rank == 0:
                shutil.rmtree(draft_of(self.folder, step), ignore_errors=True)
            raise self._failure(step, error) from error

    def _failure(self, step: int, error: ValueError) -> SaveFailed:
        complete = complete_by_size(self.folder)
        rest = f"{complete[0].name} is still good" if complete else "there is no earlier one"
        return SaveFailed(f"{checkpoint_name(step)} was not saved: {error}; {rest}")

    def _capture(self, job: _Job) -> None:
        """Write the state, or copy it to host memory, before the next step changes it."""
        if not self.config.background:
            _write_files(job)
            return
        try:
            job.files = copy_to_host(job.files)
        except (RuntimeError, MemoryError) as error:
            raise ValueError(
                f"checkpoint.background = true: no host memory for a copy "
                f"({first_line(error)}); set checkpoint.background=false"
            ) from error

    def _work(self, job: _Job) -> None:
        """Finish a save in the thread, while training continues."""
        try:
            with write_errors(job.draft):
                _write_files(job)
                write_part(job.draft, self._rank, job.names, job.finite)
        except ValueError as error:
            job.part_error = error
            write_failure(job.draft, self._rank, job.names, str(error))
        finally:
            job.part_done.set()
        if self._rank == 0:
            self._commit(job)

    def _commit(self, job: _Job) -> None:
        import deepspeed

        versions = {"torch": torch.__version__, "deepspeed": deepspeed.__version__}
        try:
            with write_errors(job.draft):
                parts = wait_for_parts(job.draft, self._ranks, job.abort)
                fields = {**versions, "saved_under": asdict(engine_topology(self.engine))}
                path = commit(self.folder, job.step, parts, fields)
        except ValueError as error:
            job.commit_error = error
            shutil.rmtree(job.draft, ignore_errors=True)
            if not job.abort.is_set():  # else `finish` reports the cause
                self._report_failure(job, self._failure(job.step, error))
            return
        try:  # the checkpoint is committed: errors below are warnings
            script = Path(deepspeed.__file__).parent / "utils" / RECOVERY_SCRIPT
            if not (self.folder / RECOVERY_SCRIPT).exists():
                shutil.copyfile(script, self.folder / RECOVERY_SCRIPT)
            prune(self.folder, self.config.keep, self.config.keep_hours, time.time())
            self.on_saved(job.step, path, job.stall)
        except Exception as error:
            warnings.warn(f"after saving {path}: {error!r}", stacklevel=2)

    def _report_failure(self, job: _Job, failure: SaveFailed) -> None:
        if self._rank == 0 and not job.failure_reported:
            job.failure_reported = True
            self.on_failed(failure)


def _write_files(job: _Job) -> None:
    """Write the files that are not yet written, and free their memory."""
    for name in list(job.files):
        with write_errors(job.draft / name):
            write_file(job.draft / name, job.files.pop(name))
