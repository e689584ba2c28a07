"""Traffic of a ZeRO setting: bytes that each rank sends per optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from nsa.planner.model import BatchShape, Model, exchange_bytes, exchange_count


@dataclass(frozen=True)
class Zero:
    """The ZeRO settings that memory and traffic depend on."""

    stage: int
    reduce_bytes: int = 2  # bytes per gradient element in a reduction
    accumulate_bytes: int = 2  # bytes per accumulated gradient element
    bucket: int = 0  # elements; 0: one collective after the backward pass
    overlap: bool = False  # buckets are reduced during the backward pass
    prefetch: int = 0  # stage 3: prefetched parameters
    persistent: int = 0  # stage 3: parameters that are not sharded
    persistent_tensors: int = 0  # stage 3: tensors that are not sharded
    gathers: int = 1  # stage 3: all-gathers of the weights per micro-batch
    muon: bool = False  # one moment per matrix instead of two
    offload: bool = False  # to the CPU or NVMe, which no figure accounts for

    @property
    def bf16_optimizer(self) -> bool:
        """Whether each rank keeps all gradients in fp32 (BF16_Optimizer)."""
        return self.stage == 1 and self.accumulate_bytes == 4 and self.bucket == 0


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends, by phase of the step."""

    reduce: float  # gradients, per reduction
    reductions: int  # per step
    gather: float  # weights, per step; never overlapped
    fetch: float  # stage 3: weights, per micro-batch
    tail: float  # part of each reduction that cannot start before the backward pass ends
    exchange: float  # sequence parallelism, per step; never overlapped
    collectives: int  # started per step

    @property
    def bytes_per_step(self) -> float:
        zero = self.reduce * self.reductions + self.gather + self.fetch * self.reductions
        return zero + self.exchange


def traffic(model: Model, zero: Zero, batch: BatchShape, ranks: int) -> Traffic:
    """Return ring traffic: an all-reduce sends 2(n-1)/n of its input, an all-gather (n-1)/n."""
    ring = (ranks - 1) / ranks
    weights = ring * model.weight_bytes
    passes = 1 if zero.stage == 3 else 2  # stages 0 to 2 all-reduce
    reduce = passes * ring * zero.reduce_bytes
    # Stage 3 gathers sharded weights per micro-batch, and persistent ones after the update.
    gathered_once = {0: 0, 3: zero.persistent}.get(zero.stage, model.parameters)
    sharded = model.parameters - zero.persistent if zero.stage == 3 else 0
    layers = model.parameters - model.embedding  # a bucket for all fills as the pass ends
    last = min(zero.bucket, model.layer) if zero.bucket < layers else layers
    return Traffic(
        reduce=reduce * model.parameters,
        reductions=batch.accumulation if zero.stage >= 2 else 1,
        gather=weights * gathered_once,
        fetch=weights * sharded * zero.gathers,
        tail=reduce * (model.embedding + last),
        exchange=batch.accumulation * exchange_bytes(model, batch),
        collectives=_collectives(model, zero, batch),
    )


def _collectives(model: Model, zero: Zero, batch: BatchShape) -> int:
    """Count the collectives of a step, including the small ones for grad_norm and overflow."""
    layers = model.parameters - model.embedding
    reductions = batch.accumulation if zero.stage >= 2 else 1
    shared = batch.accumulation * exchange_count(model, batch)
    if not zero.bucket:  # one reduction, and all-gathers of two parameter groups
        return shared + (3 if zero.stage else 1)
    buckets = -(-layers // zero.bucket) + 1  # the embedding has its own
    if zero.stage == 3:
        buckets += zero.gathers * (-(-layers // max(zero.prefetch, 1)) + 1)
        return shared + reductions * buckets + zero.persistent_tensors + 2
    return shared + reductions * buckets + 4
