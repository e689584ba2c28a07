"""Search: rank the settings that fit into memory, for a given number of sequences per step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from nsa.planner.model import Batch, Model
from nsa.planner.step import Forecast, Hardware, fits, forecast
from nsa.planner.traffic import Zero

MODES = ("none", "selective", "reentrant")  # the other two cost the same as reentrant


@dataclass(frozen=True)
class Candidate:
    """A DeepSpeed config and batch, with its forecast."""

    config: str
    batch: Batch
    forecast: Forecast


def search(
    model: Model, zeros: Mapping[str, Zero], batch: Batch, hardware: Hardware, ranks: int
) -> list[Candidate]:
    """Return the settings that fit, fastest first; sequences per step stay the same.

    Ties go to the larger micro-batch, which keeps a GPU busier than `mfu` models, then to less
    memory.
    """
    candidates = [
        Candidate(name, other, forecast(model, zero, other, hardware, ranks))
        for name, zero in zeros.items()
        for other in _batches(model, batch, ranks)
    ]
    fitting = [one for one in candidates if fits(one.forecast.memory, hardware)]
    return sorted(fitting, key=_order)


def compare(
    model: Model, zeros: Mapping[str, Zero], batch: Batch, hardware: Hardware, ranks: int
) -> list[Candidate]:
    """Return each config with the same batch, by name."""
    return [
        Candidate(name, batch, forecast(model, zero, batch, hardware, ranks))
        for name, zero in sorted(zeros.items())
    ]


def _order(one: Candidate) -> tuple[float, int, int]:
    return (
        -round(one.forecast.tokens_per_second),
        -one.batch.micro_batch,
        one.forecast.memory.peak,
    )


def _batches(model: Model, batch: Batch, ranks: int) -> Iterator[Batch]:
    """Yield every split of the same sequences; up to `kv_heads` ranks may share one."""
    sequences = batch.micro_batch * batch.accumulation * (ranks // batch.shared_by)
    for shared_by in range(1, model.kv_heads + 1):
        groups = ranks // shared_by
        if any(size % shared_by for size in (model.kv_heads, batch.seq_len, ranks)):
            continue
        if sequences % groups == 0:
            each = replace(batch, shared_by=shared_by)
            yield from _micro_batches(each, sequences // groups)


def _micro_batches(batch: Batch, sequences: int) -> Iterator[Batch]:
    for micro_batch in range(1, sequences + 1):
        if sequences % micro_batch == 0:
            for mode in MODES:
                yield replace(
                    batch,
                    micro_batch=micro_batch,
                    accumulation=sequences // micro_batch,
                    checkpointing=mode,
                )
