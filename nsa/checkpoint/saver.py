"""Saving while training goes on: what every rank does, and in which order.

    save    the draft is made           rank 0           \\
            DeepSpeed's state is taken  every rank        |  the training thread; all ranks
            and written, or copied to   every rank        |  go on, or all raise the same error
            the host's memory                            /
            files to disk, hashed       every rank       \\  a thread of each rank;
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nsa.checkpoint.commit import (
    Aborted,
    commit,
    draft_of,
    new_draft,
    prune,
    remove_drafts,
    wait_for_parts,
    write_failure,
    write_part,
)
from nsa.checkpoint.config import CheckpointConfig
from nsa.checkpoint.engine_state import all_finite, collect, host_copy, write
from nsa.checkpoint.errors import SaveFailed, explain
from nsa.checkpoint.manifest import STATE, checkpoint_name, newest_by_size, rank_file, rng_file
from nsa.checkpoint.rng import rng_state
from nsa.checkpoint.state_file import setting

RECOVERY = "zero_to_fp32.py"  # DeepSpeed's script for weights without an engine


@dataclass
class _Job:
    """A checkpoint that a thread is at work on."""

    step: int
    draft: Path
    files: dict[str, Any]  # still to be written, by name: objects for torch, or text
    names: list[str]  # of all of this rank's files
    finite: bool
    stall: float = 0.0
    sealed: threading.Event = field(default_factory=threading.Event)  # this rank's part is done
    abort: threading.Event = field(default_factory=threading.Event)
    failed_part: ValueError | None = None
    failed_commit: ValueError | None = None
    told: bool = False
    thread: threading.Thread | None = None


class Saver:
    """Saves one engine into one folder. Every rank has one and calls it at the same steps.

    `agree` is given this rank's error, or None, and raises on all ranks where one had an error.
    `tokenizer` is its name and fingerprint, for those who open a checkpoint without the text.
    `on_saved` (step, folder, seconds that training stood still) and `on_failed` are called on rank
    0 alone and from its thread, as soon as the outcome is known.
    """

    def __init__(
        self,
        engine: Any,
        folder: Path,
        config: CheckpointConfig,
        *,
        agree: Callable[[ValueError | None], None],
        attachments: Mapping[str, str] | None = None,
        tokenizer: Mapping[str, str] | None = None,
        on_saved: Callable[[int, Path, float], None] | None = None,
        on_failed: Callable[[SaveFailed], None] | None = None,
    ) -> None:
        self._engine = engine
        self._folder = folder
        self._config = config
        self._agree = agree
        self._attachments = dict(attachments or {})
        self._tokenizer = tokenizer
        self._on_saved = on_saved
        self._on_failed = on_failed or (lambda error: warnings.warn(str(error), stacklevel=2))
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._job: _Job | None = None
        if self._rank == 0:
            remove_drafts(folder)

    def save(self, step: int, state: dict[str, Any], rank_state: dict[str, Any] | None) -> None:
        """Save the engine, `state` (the same on all ranks) and what this rank alone remembers.

        Waits for the checkpoint before, whose failure goes to `on_failed`; raises SaveFailed where
        this one's files could not be written.
        """
        began = time.monotonic()
        with contextlib.suppress(SaveFailed):
            self.finish()
        draft = draft_of(self._folder, step)
        self._together(step, lambda: self._rank == 0 and new_draft(self._folder, step))
        files = collect(self._engine, draft)
        finite = all_finite(files)
        files[rng_file(self._rank)] = rng_state()
        if rank_state is not None:
            files[rank_file(self._rank)] = json.dumps(rank_state) + "\n"
        if self._rank == 0:
            saved = {"state": state, "saved_under": setting(self._engine)}
            if self._tokenizer is not None:
                saved["tokenizer"] = dict(self._tokenizer)
            files[STATE] = json.dumps(saved, indent=2) + "\n"
            files.update(self._attachments)
        job = _Job(step, draft, files, list(files), finite)
        self._together(step, lambda: self._take(job))
        job.stall = time.monotonic() - began
        job.thread = threading.Thread(target=self._work, args=[job], name="checkpoint", daemon=True)
        job.thread.start()
        self._job = job

    def finish(self) -> None:
        """Wait until what was saved last is a checkpoint; every rank; else SaveFailed."""
        job, self._job = self._job, None
        if job is None:
            return
        assert job.thread is not None
        job.sealed.wait()
        try:
            self._agree(job.failed_part)
            job.thread.join()
            self._agree(job.failed_commit)
        except ValueError as error:
            job.abort.set()
            job.thread.join()
            failure = self._failure(job.step, error)
            self._tell_failure(job, failure)
            raise failure from error
        finally:
            if self._rank == 0:
                shutil.rmtree(job.draft, ignore_errors=True)

    def _together(self, step: int, act: Callable[[], object]) -> None:
        """Do something on every rank that may fail on some; then all raise SaveFailed."""
        failed: ValueError | None = None
        try:
            act()
        except ValueError as error:
            failed = error
        try:
            self._agree(failed)
        except ValueError as error:
            if self._rank == 0:
                shutil.rmtree(draft_of(self._folder, step), ignore_errors=True)
            raise self._failure(step, error) from error

    def _failure(self, step: int, error: ValueError) -> SaveFailed:
        good = newest_by_size(self._folder)
        rest = f"{good.name} is still good" if good else "there is no earlier one"
        return SaveFailed(step, f"{checkpoint_name(step)} was not saved: {error}; {rest}")

    def _take(self, job: _Job) -> None:
        """Have the state safe from the next step: in files, or in host memory."""
        if not self._config.background:
            _write_files(job)
            return
        try:
            job.files = host_copy(job.files)
        except (RuntimeError, MemoryError) as error:
            raise ValueError(
                f"no host memory for a copy ({str(error).splitlines()[0]}); set "
                "checkpoint.background=false"
            ) from error

    def _work(self, job: _Job) -> None:
        """The thread: everything that training need not wait for."""
        try:
            _write_files(job)
            write_part(job.draft, self._rank, job.names, {"finite": job.finite})
        except Exception as error:
            job.failed_part = _as_value_error(error, job.draft)
            write_failure(job.draft, self._rank, job.names, str(job.failed_part))
        finally:
            job.sealed.set()
        if self._rank == 0:
            self._commit(job)

    def _commit(self, job: _Job) -> None:
        import deepspeed

        about = {
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "saved_under": setting(self._engine),
        }
        try:
            parts = wait_for_parts(job.draft, self._ranks, job.abort)
            path = commit(self._folder, job.step, parts, about)
        except Aborted:
            return  # `finish` knows why, and tells it
        except Exception as error:
            job.failed_commit = _as_value_error(error, job.draft)
            shutil.rmtree(job.draft, ignore_errors=True)
            self._tell_failure(job, self._failure(job.step, job.failed_commit))
            return
        self._after(job, path)

    def _after(self, job: _Job, path: Path) -> None:
        """What may fail without making the checkpoint worse."""
        import deepspeed

        try:
            script = self._folder / RECOVERY
            if not script.exists():
                shutil.copyfile(Path(deepspeed.__file__).parent / "utils" / RECOVERY, script)
            config = self._config
            for what in prune(self._folder, config.keep, config.keep_hours, time.time()):
                warnings.warn(what, stacklevel=2)
            if self._on_saved is not None:
                self._on_saved(job.step, path, job.stall)
        except Exception as error:
            warnings.warn(f"after saving {path}: {error!r}", stacklevel=2)

    def _tell_failure(self, job: _Job, failure: SaveFailed) -> None:
        if self._rank == 0 and not job.told:
            job.told = True
            self._on_failed(failure)


def _write_files(job: _Job) -> None:
    """Write what is left to write, and let go of it."""
    for name in list(job.files):
        content = job.files.pop(name)
        path = job.draft / name
        try:
            if isinstance(content, str):
                path.write_text(content, encoding="utf-8")
            else:
                write(path, content)
        except Exception as error:
            raise ValueError(explain(error, path)) from error


def _as_value_error(error: Exception, path: Path) -> ValueError:
    return error if isinstance(error, ValueError) else ValueError(explain(error, path))
