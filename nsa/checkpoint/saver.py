"""Save and load an engine, all ranks together while training waits; an error raises on all ranks.

the draft is created                      rank 0
DeepSpeed's state captured, written,
synced and hashed                         every rank
manifest, rename, latest                  rank 0
old checkpoints removed                   rank 0
"""

from __future__ import annotations

import contextlib
import copy
import io
import random
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nsa.checkpoint.commit import (
    checkpoint_name,
    commit,
    complete_by_size,
    draft_of,
    explain_write_errors,
    new_draft,
    prune,
    remove_drafts,
    rng_file,
    write_part,
)
from nsa.checkpoint.state_file import (
    ANY_RANKS,
    STATE,
    Checkpoint,
    Topology,
    check_loadable,
    layout_of,
)
from nsa.untrusted import data_only
from nsa.validation import at_least

# Settings of a parameter group that loading a checkpoint must not replace. The loop sets `lr`.
OPTIMIZER_SETTINGS = ("betas", "eps", "momentum", "weight_decay", "decay", "lr_factor")


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
    had an error. `tokenizer` holds name and fingerprint of the dataset's tokenizer, so that a
    checkpoint can be used without the dataset.
    """

    engine: Any
    folder: Path
    config: CheckpointConfig
    _: KW_ONLY
    barrier: Callable[[ValueError | None], object]
    attachments: Mapping[str, str] = field(default_factory=dict)  # texts by file name
    tokenizer: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        if self._rank == 0:
            remove_drafts(self.folder)

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Save the engine and `state`, which all ranks pass alike; return the checkpoint.

        Raise SaveFailed on all ranks if one cannot write its files.
        """
        import deepspeed

        draft, topology = draft_of(self.folder, step), engine_topology(self.engine)
        self._on_rank_0(step, lambda: new_draft(self.folder, step))
        files = capture(self.engine, draft)
        files[rng_file(self._rank)] = rng_state()
        if self._rank == 0:
            files[STATE] = Checkpoint(draft, state, topology, self.tokenizer).to_json()
            files.update(self.attachments)
        self._on_all_ranks(step, lambda: self._write(draft, files))
        manifest = {
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "saved_under": asdict(topology),
        }
        self._on_rank_0(step, lambda: commit(self.folder, step, self._ranks, manifest))
        path = self.folder / checkpoint_name(step)
        if self._rank == 0:
            try:
                prune(self.folder, self.config.keep)
            except Exception as error:  # the step is saved, and the other ranks continue
                warnings.warn(f"after saving {path}: {error!r}", stacklevel=2)
        return path

    def _on_rank_0(self, step: int, action: Callable[[], object]) -> None:
        """Run an action on rank 0; if it fails, raise SaveFailed on all ranks."""
        self._on_all_ranks(step, action if self._rank == 0 else lambda: None)

    def _on_all_ranks(self, step: int, action: Callable[[], object]) -> None:
        """Run an action on every rank; if it fails on any, raise SaveFailed on all."""
        draft, failed = draft_of(self.folder, step), None
        try:
            with explain_write_errors(draft):
                action()
        except ValueError as error:
            failed = error
        try:
            self.barrier(failed)
        except ValueError as error:
            if self._rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            complete = complete_by_size(self.folder)
            earlier = f"{complete[0].name} is still good" if complete else "there is no earlier one"
            name = checkpoint_name(step)
            raise SaveFailed(f"{name} was not saved: {error}; {earlier}") from error

    def _write(self, draft: Path, files: dict[str, Any]) -> None:
        """Write this rank's files and its part of the manifest."""
        for name, content in files.items():
            with explain_write_errors(draft / name):
                if isinstance(content, str):
                    (draft / name).write_text(content, encoding="utf-8")
                else:
                    with (draft / name).open("wb") as file:  # given a path, torch.save hides errors
                        torch.save(content, file)
        write_part(draft, self._rank, files)


def capture(engine: Any, draft: Path) -> dict[str, Any]:
    """Return this rank's files by name, with the engine's own tensors. Call it on all ranks.

    DeepSpeed writes between its collectives, so a rank with a full disk would raise while the
    others wait for it. Here its checkpoint engine only records the files; they are written later.
    """
    files: dict[str, Any] = {}
    original = engine.checkpoint_engine
    recorder = copy.copy(original)
    recorder.makedirs = lambda path, exist_ok=False: None
    recorder.save = lambda state_dict, path: files.update({Path(path).name: state_dict})
    engine.checkpoint_engine = recorder
    # DeepSpeed would add its script that gathers the weights, which `nsa export` does here.
    engine._copy_recovery_script = lambda path: None
    try:
        engine.save_checkpoint(str(draft.parent), tag=draft.name, save_latest=False)
    finally:
        engine.checkpoint_engine = original
        del engine._copy_recovery_script
    return files


def load_checkpoint(engine: Any, saved: Checkpoint) -> None:
    """Restore weights, optimizer and random numbers on every rank from a checkpoint.

    DeepSpeed also restores the optimizer's settings; this launch's settings then replace them.
    """
    checkpoint, optimizer = saved.folder, engine.optimizer
    check_loadable(checkpoint, saved.topology, engine_topology(engine))
    clip = getattr(optimizer, "clip_grad", None)
    settings = [
        {name: group[name] for name in OPTIMIZER_SETTINGS if name in group}
        for group in optimizer.param_groups
    ]
    # DeepSpeed reads this at each load. An engine may load a universal checkpoint, then another.
    engine._config.load_universal_checkpoint = saved.topology.ranks == ANY_RANKS
    with data_only(checkpoint):
        # BF16_Optimizer prints what looks like errors.
        with contextlib.redirect_stdout(io.StringIO()):
            path, _ = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
        if path is None:
            raise ValueError(f"{checkpoint} could not be loaded; see DeepSpeed's warning above")
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)
        if clip is not None:
            optimizer.clip_grad = clip
        rng = checkpoint / rng_file(dist.get_rank())
        if rng.exists():  # the saved run may have had fewer ranks
            _restore_rng(torch.load(rng, map_location="cpu", weights_only=True))


def rng_state() -> dict[str, Any]:
    """Return this rank's random number generators, in types that torch.load reads safely."""
    numpy: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = numpy
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_rng(state: dict[str, Any]) -> None:
    kind, keys, *rest = state["numpy"]
    torch.set_rng_state(state["torch"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def engine_topology(engine: Any) -> Topology:
    """Return an engine's topology, which decides what checkpoints it can load."""
    precision = "fp16" if engine.fp16_enabled() else "fp32"
    if engine.bfloat16_enabled():
        precision = "bf16"
    layout = layout_of(engine.zero_optimization_stage())
    return Topology(layout, precision, ranks=dist.get_world_size())
