"""Which setting is fastest among those that fit, for one number of sequences a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from nsa.planner.model import Batch, Model
from nsa.planner.step import Forecast, Hardware, fits, forecast
from nsa.planner.traffic import Zero

MODES = ("none", "selective", "reentrant")  # the other two cost what reentrant costs


@dataclass(frozen=True)
class Found:
    """A setting that fits."""

    config: str
    batch: Batch
    forecast: Forecast


def search(
    model: Model, zeros: Mapping[str, Zero], batch: Batch, hardware: Hardware, ranks: int
) -> list[Found]:
    """Fastest first. A step keeps its sequences: a larger micro-batch means less accumulation.

    Of equally fast ones the larger micro-batch comes first, which keeps a GPU busier than `mfu`
    knows, then the one with less memory.
    """
    found = [
        Found(name, other, forecast(model, zero, other, hardware, ranks))
        for name, zero in zeros.items()
        for other in _batches(model, batch, ranks)
    ]
    fitting = [one for one in found if fits(one.forecast.memory, hardware)]
    return sorted(fitting, key=_order)


def compare(
    model: Model, zeros: Mapping[str, Zero], batch: Batch, hardware: Hardware, ranks: int
) -> list[Found]:
    """Each config with the same batch, in the order of the names."""
    return [
        Found(name, batch, forecast(model, zero, batch, hardware, ranks))
        for name, zero in sorted(zeros.items())
    ]


def _order(one: Found) -> tuple[float, int, int]:
    return (
        -round(one.forecast.tokens_per_second),
        -one.batch.micro_batch,
        one.forecast.memory.peak,
    )


def _batches(model: Model, batch: Batch, ranks: int) -> Iterator[Batch]:
    """As many ranks may share a sequence as there are KV heads; each then has more of them."""
    sequences = batch.micro_batch * batch.accumulation * (ranks // batch.shared_by)
    for shared_by in range(1, model.kv_heads + 1):
        groups = ranks // shared_by
        if any(whole % shared_by for whole in (model.kv_heads, batch.seq_len, ranks)):
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
