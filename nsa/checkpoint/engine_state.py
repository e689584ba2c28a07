"""State of a DeepSpeed engine and of the random number generators: capture, load."""

from __future__ import annotations

import contextlib
import copy
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nsa.checkpoint.manifest import rng_file
from nsa.checkpoint.safe_load import data_only
from nsa.checkpoint.state_file import ANY_RANKS, SavedState, Topology, check_loadable, layout_of


def capture(engine: Any, draft: Path) -> dict[str, Any]:
    """Return this rank's files by name, with the engine's tensors, not copies. Call on all ranks.

    DeepSpeed writes between its collectives, so a rank with a full disk would raise while the
    others wait for it. Here its checkpoint engine only records the files; they are written later.
    """
    files: dict[str, Any] = {}
    original = engine.checkpoint_engine
    recorder = copy.copy(original)
    recorder.makedirs = lambda path, exist_ok=False: None
    recorder.save = lambda state_dict, path: files.update({Path(path).name: state_dict})
    engine.checkpoint_engine = recorder
    engine._copy_recovery_script = lambda path: None  # copied after the commit
    try:
        engine.save_checkpoint(str(draft.parent), tag=draft.name, save_latest=False)
    finally:
        engine.checkpoint_engine = original
        del engine._copy_recovery_script
    return files


def all_finite(files: dict[str, Any]) -> bool:
    """Return whether no tensor holds NaN or inf; synchronize each device once."""
    extremes: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in _tensors(files):
        if tensor.is_floating_point() and tensor.numel():
            pair = torch.stack(tensor.detach().aminmax()).float()  # a NaN makes both NaN
            extremes.setdefault(tensor.device, []).append(pair)
    return all(bool(torch.stack(pairs).isfinite().all()) for pairs in extremes.values())


def write_file(path: Path, content: Any) -> None:
    """Write one file of a checkpoint: text, or objects as DeepSpeed reads them."""
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
        return
    with path.open("wb") as file:  # given a path, torch.save hides why a write failed
        torch.save(content, file)


def load(engine: Any, saved: SavedState) -> None:
    """Restore weights, optimizer and random numbers on every rank from a checkpoint."""
    checkpoint = saved.checkpoint
    check_loadable(checkpoint, saved.topology, engine_topology(engine))
    # DeepSpeed reads this at each load. An engine may load a universal checkpoint, then another.
    engine._config.load_universal_checkpoint = saved.topology.ranks == ANY_RANKS
    with data_only(checkpoint):
        # BF16_Optimizer prints what looks like errors.
        with contextlib.redirect_stdout(io.StringIO()):
            path, _ = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
        if path is None:
            raise ValueError(f"{checkpoint} could not be loaded; see DeepSpeed's warning above")
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
    """Return the topology of an engine, which must equal that of a checkpoint to load."""
    bf16, fp16 = engine.bfloat16_enabled(), engine.fp16_enabled()
    muon = any(group.get("use_muon") for group in engine.optimizer.param_groups)
    return Topology(
        layout=layout_of(engine.zero_optimization_stage(), muon),
        precision="bf16" if bf16 else "fp16" if fp16 else "fp32",
        ranks=dist.get_world_size(),
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
