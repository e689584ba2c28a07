"""What a ZeRO setting sends: bytes of each rank for one update of the weights, and when."""

from __future__ import annotations

from dataclasses import dataclass

from nsa.plan.model import Model


@dataclass(frozen=True)
class Zero:
    """A DeepSpeed config as the planner reads it."""

    stage: int
    reduce_bytes: int = 2  # of a gradient on the link
    accumulate_bytes: int = 2  # of a gradient that waits for the next micro-batch
    bucket: int = 0  # elements; 0: everything in one collective after the backward pass
    overlap: bool = False  # buckets are on their way during the backward pass
    prefetch: int = 0  # stage 3: parameters fetched ahead
    persistent: int = 0  # stage 3: parameters that every rank keeps whole
    gathers: int = 1  # stage 3: how often a micro-batch gathers the weights

    @property
    def whole_gradients(self) -> bool:
        """BF16_Optimizer: fp32 gradients of all parameters on each rank, no buckets."""
        return self.stage == 1 and self.accumulate_bytes == 4 and self.bucket == 0


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends. What hides must hide behind the pass that it belongs to."""

    reduce: float  # gradients, each time that they are reduced
    reductions: int  # how often in a step
    gather: float  # weights, once a step, behind nothing
    fetch: float  # stage 3: weights of one micro-batch
    tail: float  # of each reduction: what is complete only as the backward pass ends
    collectives: int  # started in a step

    @property
    def bytes_per_step(self) -> float:
        return self.reduce * self.reductions + self.gather + self.fetch * self.reductions


def traffic(model: Model, zero: Zero, accumulation: int, ranks: int) -> Traffic:
    """Of a ring: all-reduce 2(n-1)/n of what it is given, gather and scatter (n-1)/n."""
    share = (ranks - 1) / ranks
    reductions = accumulation if zero.stage >= 2 else 1
    sharded = model.parameters - zero.persistent
    passes = 1 if zero.stage == 3 else 2  # DeepSpeed's stages 1 and 2 all-reduce as stage 0 does
    reduce = passes * share * zero.reduce_bytes * model.parameters
    gather = share * model.weight_bytes * model.parameters if zero.stage in (1, 2) else 0.0
    fetch = share * model.weight_bytes * sharded * zero.gathers if zero.stage == 3 else 0.0
    last = model.embedding + min(zero.bucket or model.parameters, model.layer)
    tail = passes * share * zero.reduce_bytes * min(last, model.parameters)
    return Traffic(reduce, reductions, gather, fetch, tail, _collectives(model, zero, accumulation))


def _collectives(model: Model, zero: Zero, accumulation: int) -> int:
    """Starts are what many ranks pay for; a norm's and an overflow's small ones come with each."""
    agreed = 2
    if zero.stage == 3:
        buckets = -(-(model.parameters - model.embedding) // max(zero.bucket, 1)) + 1
        fetched = -(-model.parameters // max(zero.prefetch, model.layer)) * zero.gathers
        return accumulation * (buckets + fetched) + agreed
    if not zero.bucket:
        return 1 + agreed + (2 if zero.stage else 0)
    buckets = -(-(model.parameters - model.embedding) // zero.bucket) + 1
    return buckets * (accumulation if zero.stage == 2 else 1) + agreed + 2
