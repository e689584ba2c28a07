"""What DeepSpeed wants to save, taken from it before it touches a disk.

DeepSpeed writes in the middle of its collectives: where a disk is full on one rank, that rank
raises and the others wait for it. So it is handed a checkpoint engine that only takes notes, and
writing is our business.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def collect(engine: Any, draft: Path) -> dict[str, Any]:
    """This rank's files and what is to be in them: the engine's own tensors, not copies.

    Every rank must call it: DeepSpeed's barriers are inside.
    """
    files: dict[str, Any] = {}
    usual = engine.checkpoint_engine
    taking_notes = copy.copy(usual)
    taking_notes.makedirs = lambda path, exist_ok=False: None
    taking_notes.save = lambda state_dict, path: files.update({Path(path).name: state_dict})
    engine.checkpoint_engine = taking_notes
    engine._copy_recovery_script = lambda path: None  # written with the commit
    try:
        engine.save_checkpoint(str(draft.parent), tag=draft.name, save_latest=False)
    finally:
        engine.checkpoint_engine = usual
        del engine._copy_recovery_script
    return files


def all_finite(files: dict[str, Any]) -> bool:
    """Whether every number to be saved is one; the device is asked once."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in _tensors(files):
        if tensor.is_floating_point() and tensor.numel():
            ends = torch.stack(tensor.detach().aminmax()).float()  # NaN is both
            by_device.setdefault(tensor.device, []).append(ends)
    return all(bool(torch.stack(same).isfinite().all()) for same in by_device.values())


def host_copy(files: dict[str, Any]) -> dict[str, Any]:
    """The same in host memory, for a thread to write while training changes the original.

    Tensors that share memory go on sharing it, as they do in a file of torch.save.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, Any] = {}
    for tensor in _tensors(files):
        source = tensor.untyped_storage()
        if source._cdata not in storages:
            flat = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)
            there = torch.empty(
                source.nbytes(), dtype=torch.uint8, pin_memory=source.device.type == "cuda"
            )
            there.copy_(flat, non_blocking=True)
            storages[source._cdata] = there.untyped_storage()
        copied = torch.empty(0, dtype=tensor.dtype).set_(
            storages[source._cdata], tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        if isinstance(tensor, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, tensor.requires_grad)
        copies[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copy.deepcopy(files, copies)


def write(path: Path, content: Any) -> None:
    """One file of a checkpoint, in the format that DeepSpeed reads."""
    with path.open("wb") as file:  # torch's own writer hides the cause where it fails
        torch.save(content, file)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
