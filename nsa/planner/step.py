"""How long a step takes: what is computed, what is sent, and how much of that nothing hides."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nsa.planner.memory import Memory, memory
from nsa.planner.model import Batch, Model, flops_per_token
from nsa.planner.traffic import Traffic, Zero, traffic

BACKWARD_SHARE = 2 / 3  # of a micro-batch without recomputation
RESERVE = 2e9  # bytes: CUDA's context, NCCL's buffers
GAPS = 1.1  # between tensors, in the caching allocator


@dataclass(frozen=True)
class Hardware:
    """What a GPU and its links can do. All of it is said by the user or assumed; none measured."""

    flops: float  # a second, dense peak in the training's dtype
    mfu: float  # the share of it that a GPU reaches while it computes
    link: float  # bytes a second that one GPU sends to its neighbour
    network: float = math.inf  # bytes a second that one node sends to the next
    nodes: int = 1
    memory: float = math.inf  # bytes of a GPU
    start: float = 20e-6  # seconds to start a collective, times log2 of the ranks
    overlaps: bool = True  # gloo's ranks wait for what they send; NCCL's streams do not
    gathering: float = 1.0  # share of the rate that gathering weights reaches


@dataclass(frozen=True)
class Forecast:
    """One step of one setting."""

    memory: Memory
    traffic: Traffic
    compute: float  # seconds
    communication: float  # seconds, hidden or not
    exposed: float  # seconds that nothing hides
    tokens: int  # of a step, all ranks together

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def exposed_share(self) -> float:
        return self.exposed / self.seconds


def forecast(model: Model, zero: Zero, batch: Batch, hardware: Hardware, ranks: int) -> Forecast:
    """Memory, bytes and seconds of one step."""
    sent = traffic(model, zero, batch, ranks)
    work = batch.tokens * flops_per_token(model, batch.checkpointing)
    micro = work / (hardware.flops * hardware.mfu)
    whole, exposed = communication_seconds(sent, zero, batch, hardware, ranks, micro)
    return Forecast(
        memory=memory(model, zero, batch, ranks),
        traffic=sent,
        compute=micro * batch.accumulation,
        communication=whole,
        exposed=exposed,
        tokens=batch.tokens * batch.accumulation * ranks,
    )


def communication_seconds(
    sent: Traffic, zero: Zero, batch: Batch, hardware: Hardware, ranks: int, micro: float
) -> tuple[float, float]:
    """All of it, and what is exposed beside micro-batches of `micro` seconds.

    A ring through several nodes crosses each border once in each direction, so that a node's
    network carries what one rank sends: the slower of link and network sets the pace.
    """
    far = min(hardware.link, hardware.network)
    rate = hardware.link if hardware.nodes == 1 else far
    near = ranks // hardware.nodes % batch.shared_by == 0  # a node has all ranks of a sequence
    starting = sent.collectives * hardware.start * math.log2(ranks) if ranks > 1 else 0.0
    reduce, tail = sent.reduce / rate, sent.tail / rate
    gather, fetch = (part / (rate * hardware.gathering) for part in (sent.gather, sent.fetch))
    waited = starting + gather + sent.exchange / (hardware.link if near else far)
    whole = waited + sent.reductions * (reduce + fetch)
    if not (zero.overlap and hardware.overlaps):
        return whole, whole
    behind = micro * _backward_share(batch.checkpointing)
    late = max(tail, reduce - behind)
    if zero.stage == 3:  # the first layer's weights are waited for, the rest come ahead of use
        late = max(tail, reduce + fetch - micro)
    return whole, min(whole, waited + sent.reductions * late)


def fits(found: Memory, hardware: Hardware) -> bool:
    """Whether the peak leaves room for what torch does not allocate."""
    return found.peak * GAPS + RESERVE <= hardware.memory


def _backward_share(checkpointing: str) -> float:
    """Of a micro-batch's seconds; recomputation belongs to the backward pass."""
    return BACKWARD_SHARE if checkpointing == "none" else 3 / 4
