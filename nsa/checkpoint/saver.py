"""Checkpoint saver: all ranks save together while training waits; all raise the same error.

the draft is created                      rank 0
DeepSpeed's state captured, written,
synced and hashed                         every rank
manifest, rename, latest                  rank 0
old checkpoints removed                   rank 0
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nsa.atomic_io import atomic_write
from nsa.checkpoint.commit import (
    commit,
    draft_of,
    new_draft,
    prune,
    remove_drafts,
    write_errors,
    write_part,
)
from nsa.checkpoint.engine_state import all_finite, capture, engine_topology, rng_state, write_file
from nsa.checkpoint.manifest import checkpoint_name, complete_by_size, rng_file
from nsa.checkpoint.state_file import STATE, SavedState, rank_file
from nsa.validation import at_least

RECOVERY_SCRIPT = "zero_to_fp32.py"  # of DeepSpeed; gathers weights without an engine


@dataclass
class CheckpointConfig:
    """The `checkpoint` section of a run's settings; the last step is always saved."""

    every: int = 5_000  # steps between two checkpoints; 0: only at the end
    keep: int = 0  # number of newest checkpoints to keep; 0: all

    def validate(self) -> None:
        at_least(0, "checkpoint", self, "every", "keep")


class SaveFailed(ValueError):
    """A checkpoint that was not saved. All ranks raise it together, and training can continue."""


@dataclass(eq=False)
class Saver:
    """Saves one engine into one folder. Every rank has one and calls it at the same steps.

    `barrier` takes this rank's error or None, waits for all ranks, and raises on all of them if one
    had an error. `tokenizer` holds name and fingerprint of the dataset's tokenizer, to use a
    checkpoint without the dataset; `run_id` names the run in the manifest. On rank 0, `on_saved`
    receives step, folder and the seconds that training waited.
    """

    engine: Any
    folder: Path
    config: CheckpointConfig
    _: KW_ONLY
    barrier: Callable[[ValueError | None], object]
    attachments: Mapping[str, str] = field(default_factory=dict)  # texts by file name
    tokenizer: Mapping[str, str] | None = None
    run_id: str | None = None
    on_saved: Callable[[int, Path, float], None] = lambda step, folder, stall: None

    def __post_init__(self) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        if self._rank == 0:
            remove_drafts(self.folder)

    def save(self, step: int, state: dict[str, Any], rank_state: dict[str, Any] | None) -> None:
        """Save the engine, `state` (the same on all ranks) and `rank_state` (of this rank).

        Raise SaveFailed on all ranks if one cannot write its files.
        """
        start = time.monotonic()
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
        self._on_all_ranks(step, lambda: self._write(draft, files, finite))
        self._on_all_ranks(step, lambda: self._rank == 0 and self._commit(step))
        if self._rank == 0:
            self._finish(step, time.monotonic() - start)

    def _on_all_ranks(self, step: int, action: Callable[[], object]) -> None:
        """Run an action on every rank; if it fails on any, raise SaveFailed on all."""
        draft, failed = draft_of(self.folder, step), None
        try:
            with write_errors(draft):
                action()
        except ValueError as error:
            failed = error
        try:
            self.barrier(failed)
        except ValueError as error:
            if self._rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            complete = complete_by_size(self.folder)
            rest = f"{complete[0].name} is still good" if complete else "there is no earlier one"
            name = checkpoint_name(step)
            raise SaveFailed(f"{name} was not saved: {error}; {rest}") from error

    def _write(self, draft: Path, files: dict[str, Any], finite: bool) -> None:
        """Write this rank's files and its part of the manifest."""
        for name, content in files.items():
            with write_errors(draft / name):
                write_file(draft / name, content)
        write_part(draft, self._rank, files, finite)

    def _commit(self, step: int) -> Path:
        import deepspeed

        fields = {
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "saved_under": asdict(engine_topology(self.engine)),
        }
        if self.run_id is not None:
            fields["run"] = self.run_id
        return commit(self.folder, step, self._ranks, fields)

    def _finish(self, step: int, stall: float) -> None:
        """Copy DeepSpeed's script, prune, report; errors are warnings, as the step is saved."""
        import deepspeed

        path, script = self.folder / checkpoint_name(step), self.folder / RECOVERY_SCRIPT
        try:
            if not script.exists():
                source = Path(deepspeed.__file__).parent / "utils" / RECOVERY_SCRIPT
                atomic_write(script, [source.read_bytes()])
            prune(self.folder, self.config.keep)
            self.on_saved(step, path, stall)
        except Exception as error:
            warnings.warn(f"after saving {path}: {error!r}", stacklevel=2)
