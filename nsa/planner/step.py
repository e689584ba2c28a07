"""Forecast of a step: memory, traffic, compute, and exposed communication."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nsa.planner.memory import Memory, memory
from nsa.planner.model import BatchShape, Model, flops_per_token
from nsa.planner.traffic import Traffic, Zero, traffic

BACKWARD_FRACTION = 2 / 3  # of a micro-batch without recomputation
RESERVE = 2e9  # bytes: CUDA's context, NCCL's buffers
FRAGMENTATION = 1.1  # of the caching allocator


@dataclass(frozen=True)
class Hardware:
    """Speed of GPUs and links: set by the user or assumed, never measured."""

    flops: float  # dense peak in the training dtype, 1/s
    mfu: float  # fraction of the peak that a GPU reaches while it computes
    link: float  # bytes/s from one GPU to its neighbour
    network: float = math.inf  # bytes/s from one node to the next
    nodes: int = 1
    memory: float = math.inf  # bytes of a GPU
    latency: float = 20e-6  # seconds per collective, times log2(ranks)
    overlaps: bool = True  # False for gloo, which blocks
    gather_efficiency: float = 1.0  # all-gather bandwidth / all-reduce bandwidth


@dataclass(frozen=True)
class Forecast:
    """One step of one setting."""

    memory: Memory
    traffic: Traffic
    compute: float  # seconds
    communication: float  # seconds, hidden or exposed
    exposed: float  # seconds of communication that no computation hides
    tokens: int  # per step, over all ranks

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def exposed_fraction(self) -> float:
        return self.exposed / self.seconds


def forecast(
    model: Model, zero: Zero, batch: BatchShape, hardware: Hardware, ranks: int
) -> Forecast:
    """Return memory, traffic and time of one optimizer step."""
    sent = traffic(model, zero, batch, ranks)
    work = batch.tokens * flops_per_token(model, batch.checkpointing)
    micro = work / (hardware.flops * hardware.mfu)
    total, exposed = communication_seconds(sent, zero, batch, hardware, ranks, micro)
    return Forecast(
        memory=memory(model, zero, batch, ranks),
        traffic=sent,
        compute=micro * batch.accumulation,
        communication=total,
        exposed=exposed,
        tokens=batch.tokens * batch.accumulation * ranks,
    )


def communication_seconds(
    sent: Traffic, zero: Zero, batch: BatchShape, hardware: Hardware, ranks: int, micro: float
) -> tuple[float, float]:
    """Return total and exposed seconds, given micro-batches of `micro` seconds.

    In a ring over several nodes, a node's network carries what one rank sends, so the slower of
    link and network limits the rate.
    """
    across_nodes = min(hardware.link, hardware.network)
    rate = hardware.link if hardware.nodes == 1 else across_nodes
    sequence_on_one_node = ranks // hardware.nodes % batch.ranks_per_sequence == 0
    exchange_rate = hardware.link if sequence_on_one_node else across_nodes
    latency = sent.collectives * hardware.latency * math.log2(ranks) if ranks > 1 else 0.0
    reduce, tail = sent.reduce / rate, sent.tail / rate
    gather, fetch = (
        part / (rate * hardware.gather_efficiency) for part in (sent.gather, sent.fetch)
    )
    blocking = latency + gather + sent.exchange / exchange_rate
    total = blocking + sent.reductions * (reduce + fetch)
    if not (zero.overlap and hardware.overlaps):
        return total, total
    # Recomputation belongs to the backward pass.
    recomputes = batch.checkpointing not in ("none", "selective")
    backward = 3 / 4 if recomputes else BACKWARD_FRACTION
    late = max(tail, reduce - micro * backward)
    if zero.stage == 3:  # weights are prefetched, except the first layer's
        late = max(tail, reduce + fetch - micro)
    return total, min(total, blocking + sent.reductions * late)


def required(memory: Memory) -> float:
    """Return the bytes of GPU memory that a run needs, with CUDA, NCCL and fragmentation."""
    return memory.peak * FRAGMENTATION + RESERVE


def fits(memory: Memory, hardware: Hardware) -> bool:
    return required(memory) <= hardware.memory
