"""What a ZeRO setting sends: bytes of each rank for one update of the weights, and when."""

from __future__ import annotations

from dataclasses import dataclass

from nsa.planner.model import Batch, Model, exchanged, exchanges


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
    persistent_tensors: int = 0  # and how many tensors they are
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
    exchange: float  # in a step, between the ranks that share a sequence, behind nothing
    collectives: int  # started in a step

    @property
    def bytes_per_step(self) -> float:
        zero = self.reduce * self.reductions + self.gather + self.fetch * self.reductions
        return zero + self.exchange


def traffic(model: Model, zero: Zero, batch: Batch, ranks: int) -> Traffic:
    """Of a ring: all-reduce 2(n-1)/n of what it is given, gather and scatter (n-1)/n."""
    share = (ranks - 1) / ranks
    weights = share * model.weight_bytes
    passes = 1 if zero.stage == 3 else 2  # DeepSpeed's stages 1 and 2 all-reduce as stage 0 does
    reduce = passes * share * zero.reduce_bytes
    # Stage 3 gathers what is sharded for each micro-batch, and the rest after the update.
    once = {0: 0, 3: zero.persistent}.get(zero.stage, model.parameters)
    sharded = model.parameters - zero.persistent if zero.stage == 3 else 0
    last = model.embedding + min(zero.bucket or model.parameters, model.layer)
    return Traffic(
        reduce=reduce * model.parameters,
        reductions=batch.accumulation if zero.stage >= 2 else 1,
        gather=weights * once,
        fetch=weights * sharded * zero.gathers,
        tail=reduce * min(last, model.parameters),
        exchange=batch.accumulation * exchanged(model, batch),
        collectives=_collectives(model, zero, batch),
    )


def _collectives(model: Model, zero: Zero, batch: Batch) -> int:
    """Starts are what many ranks pay for; a norm's and an overflow's small ones come with each."""
    layers = model.parameters - model.embedding
    often = batch.accumulation if zero.stage >= 2 else 1
    shared = batch.accumulation * exchanges(model, batch)
    if not zero.bucket:  # one reduction, and the weights of two groups gathered
        return shared + (3 if zero.stage else 1)
    buckets = -(-layers // zero.bucket) + 1  # the embedding is one by itself
    if zero.stage == 3:
        buckets += zero.gathers * (-(-layers // max(zero.prefetch, 1)) + 1)
        return shared + often * buckets + zero.persistent_tensors + 2
    return shared + often * buckets + 4
