"""Search: rank the settings that fit into memory, at a fixed number of sequences per step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from nsa.planner.memory import memory
from nsa.planner.model import BatchShape, Model
from nsa.planner.step import Forecast, Hardware, fits, forecast, required
from nsa.planner.traffic import Zero

MODES = ("none", "selective", "reentrant")  # fastest first; the other two cost what reentrant does


@dataclass(frozen=True)
class Candidate:
    """A DeepSpeed config and batch, with its forecast."""

    config: str
    batch: BatchShape
    forecast: Forecast


def search(
    model: Model, zeros: Mapping[str, Zero], batch: BatchShape, hardware: Hardware, ranks: int
) -> list[Candidate]:
    """Return the settings that fit, fastest first.

    Ties go to the larger micro-batch, which keeps a GPU busier than `mfu` models, then to less
    memory.
    """
    candidates = [
        Candidate(name, split, forecast(model, zero, split, hardware, ranks))
        for name, zero in zeros.items()
        for split in _splits(model, batch, ranks)
    ]

    def order(candidate: Candidate) -> tuple[int, int, int]:
        step = candidate.forecast
        return -round(step.tokens_per_second), -candidate.batch.micro_batch, step.memory.peak

    return sorted((c for c in candidates if fits(c.forecast.memory, hardware)), key=order)


def compare(
    model: Model, zeros: Mapping[str, Zero], batch: BatchShape, hardware: Hardware, ranks: int
) -> list[Candidate]:
    """Return each config with the same batch, by name."""
    candidates = []
    for name, zero in sorted(zeros.items()):
        mode, _ = select_checkpointing(model, zero, batch, hardware.memory, ranks)
        shape = replace(batch, checkpointing=mode)
        candidates.append(Candidate(name, shape, forecast(model, zero, shape, hardware, ranks)))
    return candidates


def select_checkpointing(
    model: Model,
    zero: Zero,
    batch: BatchShape,
    available: float,
    ranks: int,
    modes: Sequence[str] = MODES,
) -> tuple[str, list[str]]:
    """Return the batch's mode, for `auto` the fastest of `modes` that fits, and a line on why."""
    if batch.checkpointing != "auto":
        return batch.checkpointing, []
    shapes = {mode: replace(batch, checkpointing=mode) for mode in modes}
    needs = {mode: required(memory(model, zero, x, ranks)) for mode, x in shapes.items()}
    fitting = [mode for mode in modes if needs[mode] <= available]
    selected = fitting[0] if fitting else modes[-1]
    need = needs.pop(selected)
    others = ", ".join(f"{mode} would need {size / 1e9:.1f}" for mode, size in needs.items())
    reason = f"needs about {need / 1e9:.1f} of {available / 1e9:.1f} GB; {others}; "
    reason += "CUDA, NCCL and fragmentation included"
    if not fitting:
        reason += "; does not fit: lower train.micro_batch"
    return selected, [f"activation checkpointing: {selected} ({reason})"]


def _splits(model: Model, batch: BatchShape, ranks: int) -> Iterator[BatchShape]:
    """Yield every split of a step's sequences; at most `kv_heads` ranks process one sequence."""
    sequences = batch.micro_batch * batch.accumulation * (ranks // batch.ranks_per_sequence)
    for parts in range(1, model.config.kv_heads + 1):
        if any(size % parts for size in (model.config.kv_heads, batch.seq_len, ranks)):
            continue
        per_group, rest = divmod(sequences, ranks // parts)
        for micro_batch, mode in product(range(1, per_group + 1), MODES):
            if rest == 0 and per_group % micro_batch == 0:
                yield BatchShape(batch.seq_len, micro_batch, per_group // micro_batch, mode, parts)
