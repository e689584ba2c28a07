from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from nsa.monitor.memory import MemorySnapshots, is_out_of_memory


def lines(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    text = (folder / f"memory/rank{rank}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def tensor_error() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    return caught.value


def object_error() -> MemoryError:
    with pytest.raises(MemoryError) as caught:
        bytearray(2**60)
    return caught.value


def test_snapshots_are_taken_around_the_first_step_and_every_tenth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "memory_allocated", "memory_reserved", "max_memory_allocated"
    gpu = {name: lambda gb=gb: gb * 1e9 for gb, name in enumerate(names, 1)}
    monkeypatch.setattr("nsa.monitor.memory.initialized_cuda", lambda: SimpleNamespace(**gpu))
    memory = MemorySnapshots(tmp_path, rank=2, every=10)
    for step in range(7, 24):
        memory.take(step, "before")
        memory.take(step, "after")
    memory.close()
    taken = [(line["step"], line["when"]) for line in lines(tmp_path, rank=2)]
    assert taken == [(step, when) for step in (7, 10, 20) for when in ("before", "after")]
    total = psutil.virtual_memory().total / 1e9
    for line in lines(tmp_path, rank=2):
        assert line["resident_gb"] > 0.01
        assert 0 < line["available_gb"] < total
        assert [line[f"{kind}_gb"] for kind in ("allocated", "reserved", "peak")] == [1, 2, 3]


def test_memory_allocated_in_a_step_is_visible_after_it(tmp_path: Path) -> None:
    memory = MemorySnapshots(tmp_path, rank=0, every=1)
    memory.take(1, "before")
    held = torch.ones(50_000_000)
    memory.take(1, "after")
    memory.close()
    before, after = lines(tmp_path)
    assert after["resident_gb"] - before["resident_gb"] == pytest.approx(0.2, rel=0.2)
    assert held[0] == 1


@pytest.mark.parametrize(
    "error",
    [
        tensor_error(),
        object_error(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ],
)
def test_running_out_of_memory_writes_a_snapshot_and_advice(
    tmp_path: Path, error: Exception
) -> None:
    memory = MemorySnapshots(tmp_path, rank=1, every=0)
    memory.take(17, "before")
    advice = memory.out_of_memory(error)
    assert advice is not None
    assert "\n" not in advice
    for part in (
        "rank 1",
        "step 17",
        "train.micro_batch",
        "model.activation_checkpointing",
        "data.seq_len",
        "memory/rank1.jsonl",
    ):
        assert part in advice
    (line,) = lines(tmp_path, rank=1)
    assert (line["step"], line["when"]) == (17, "out of memory")


def test_the_advice_is_given_even_if_the_snapshot_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "memory").write_text("a file where the folder should be")
    advice = MemorySnapshots(tmp_path, rank=0, every=0).out_of_memory(MemoryError())
    assert advice is not None
    assert "train.micro_batch" in advice
    assert "could not be written" in advice


def test_other_errors_get_no_advice_and_an_interval_of_0_writes_nothing(tmp_path: Path) -> None:
    memory = MemorySnapshots(tmp_path, rank=0, every=0)
    for when in ("before", "after"):
        memory.take(1, when)
    for error in (
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("train.micro_batch = 0: out of memory is not what this is"),
        KeyboardInterrupt(),
    ):
        assert not is_out_of_memory(error)
        assert memory.out_of_memory(error) is None
    assert not list(tmp_path.iterdir())
