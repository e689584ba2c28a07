"""Forecast of a step: memory, traffic, compute, exposed communication; what `auto` selects.

Memory is counted for one GPU: static tensors, and the phases of a step in which it can peak.
Traffic is counted for a ring: an all-reduce sends 2(n-1)/n of its input, an all-gather (n-1)/n.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nsa.planner.inputs import BatchShape, Model, Zero

MODES = ("none", "selective", "reentrant")  # fastest first; other modes cost as much as reentrant
# Fraction of the layers' forward time in norms, RoPE and SwiGLU. Estimated from their bytes
# (python -m tests.bench traffic), not measured.
ELEMENTWISE_FRACTION = 0.25
# By kind of attention, on one H100 (docs/benchmarks/gpu.md): the fraction of the peak that the
# production run reached, and the seconds that the host needs to start a layer's kernels in a pass.
MFU = {"dense": 0.33, "nsa": 0.297}
HOST_SECONDS = {"dense": 1.8e-3, "nsa": 3.0e-3}
RESERVE = 2e9  # bytes: CUDA's context, NCCL's buffers
FRAGMENTATION = 1.1  # of the caching allocator


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank's tensors, by purpose."""

    static: Mapping[str, int]  # held between steps
    phases: Mapping[str, Mapping[str, int]]  # on top of `static`, by phase of the step

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def at_peak(self) -> dict[str, int]:
        # The sum of two counters leaves out zeros.
        return dict(Counter(self.static) + Counter(self.phases[self.peak_phase]))

    @property
    def peak(self) -> int:
        return sum(self.at_peak.values())


def memory(model: Model, zero: Zero, batch: BatchShape, ranks: int) -> Memory:
    """Count the bytes of tensors; CUDA's context, NCCL's buffers and fragmentation are left out."""
    from nsa.planner.activations import activations  # late: imports torch

    count, size = model.parameters, model.weight_bytes
    shards = ranks if zero.stage else 1
    weights = size * count
    if zero.stage == 3:
        sharded = math.ceil((count - zero.persistent) / ranks)
        weights = size * (sharded + zero.persistent)
    has_master_weights = size == 2 or zero.stage > 0  # else the optimizer updates fp32 weights
    static = {
        "weights": weights,
        "master weights": 4 * count // shards if has_master_weights else 0,
        "optimizer moments": 8 * count // shards,
        "teacher": size * model.teacher_parameters,
        "gradients": 4 * count if zero.bf16_optimizer else 0,  # fp32 sums
    }
    buckets = {"buckets": size * zero.bucket * (2 if zero.overlap else 1)}
    gathered = size * (count + min(count, zero.prefetch)) if zero.stage == 3 else 0
    gradients = size * count  # after the backward pass
    if zero.stage >= 2:
        gradients = zero.accumulate_bytes * count // ranks
    accumulated = gradients if batch.accumulation > 1 else 0  # in earlier micro-batches
    # Stages 0 and 1 add to this sum in place; 2 and 3 keep it apart until the backward pass ends.
    earlier_sum = accumulated if zero.stage >= 2 else 0
    # Gradients of all layers but the first.
    later_layers = gradients * (model.config.layers - 1) * model.layer // model.parameters
    acts = activations(model, batch)
    in_backward = {**buckets, "gathered weights": gathered}
    phases = {
        "in the loss": {
            "gradients": accumulated,
            "activations": acts.before_loss,
            "logits and loss": acts.loss,
            "gathered weights": gathered,
        },
        "in the last layer's backward pass": {
            "gradients": accumulated,
            "activations": acts.last_layer,
            **in_backward,
        },
        "in the first layer's backward pass": {
            "gradients": max(accumulated, earlier_sum + later_layers),
            "activations": acts.first_layer,
            **in_backward,
        },
        "in the embedding's backward pass": {
            "gradients": earlier_sum + gradients,
            "activations": acts.embedding,
            **in_backward,
        },
        "while gradients are reduced": {
            "gradients": gradients + _reduction_copies(model, zero, gradients),
            **buckets,
        },
        "while weights are updated": {"gradients": _update_copies(model, zero, ranks), **buckets},
    }
    return Memory(static, phases)


def _reduction_copies(model: Model, zero: Zero, gradients: int) -> int:
    """Return the bytes that a reduction copies the gradients to; buckets are counted apart."""
    if zero.stage >= 2:
        return gradients
    if zero.bucket:
        return 0
    flat = zero.accumulate_bytes * model.parameters
    sent = zero.reduce_bytes * model.parameters  # a copy of `flat` in another dtype
    return flat + (sent if zero.reduce_bytes != zero.accumulate_bytes else 0)


def _update_copies(model: Model, zero: Zero, ranks: int) -> int:
    """Return the bytes of gradients during the update: as reduced, and copies of them."""
    if zero.stage == 0:
        return (model.weight_bytes + 4) * model.parameters  # 4: a copy in fp32
    if zero.bf16_optimizer:  # its sums in fp32 are static
        return (model.weight_bytes + 2) * model.parameters  # 2: a flat copy
    # As reduced, a flat copy, and a copy in fp32.
    return (2 * zero.accumulate_bytes + 4) * model.parameters // ranks


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends, by phase of the step."""

    reduce: float  # gradients, per reduction
    reductions: int  # per step
    gather: float  # weights, per step; never overlapped
    fetch: float  # weights of stage 3, per micro-batch
    tail: float  # part of each reduction that cannot start before the backward pass ends
    collectives: int  # started per step

    @property
    def bytes_per_step(self) -> float:
        return self.reduce * self.reductions + self.gather + self.fetch * self.reductions


def traffic(model: Model, zero: Zero, batch: BatchShape, ranks: int) -> Traffic:
    ring = (ranks - 1) / ranks
    gather_bytes = ring * model.weight_bytes  # per parameter
    passes = 1 if zero.stage == 3 else 2  # stages 0 to 2 all-reduce
    reduce_bytes = passes * ring * zero.reduce_bytes  # per parameter
    after_update = per_micro_batch = 0  # parameters to gather
    if zero.stage == 3:
        after_update, per_micro_batch = zero.persistent, model.parameters - zero.persistent
    elif zero.stage:
        after_update = model.parameters
    reductions = batch.accumulation if zero.stage >= 2 else 1
    in_layers = model.parameters - model.outside_layers
    # A bucket that holds all layers is full only after the backward pass.
    last = min(zero.bucket, model.layer) if zero.bucket < in_layers else in_layers
    return Traffic(
        reduce=reduce_bytes * model.parameters,
        reductions=reductions,
        gather=gather_bytes * after_update,
        fetch=gather_bytes * per_micro_batch * zero.gathers,
        tail=reduce_bytes * (model.embedding + last),
        collectives=_collectives(zero, in_layers, reductions),
    )


def _collectives(zero: Zero, in_layers: int, reductions: int) -> int:
    """Count the collectives of a step, including the small ones for grad_norm and overflow."""
    if not zero.bucket:  # one reduction, and all-gathers of two parameter groups
        return 3 if zero.stage else 1
    buckets = -(-in_layers // zero.bucket) + 1  # the embedding has its own
    if zero.stage == 3:
        buckets += zero.gathers * (-(-in_layers // max(zero.prefetch, 1)) + 1)
        return reductions * buckets + zero.persistent_tensors + 2
    return reductions * buckets + 4


def flops_with_recomputation(model: Model, batch: BatchShape, kind: str) -> float:
    """Return the FLOPs per token of a step with this attention, recomputation and teacher included.

    `selective` recomputes no product, only elementwise operations, which take time but few FLOPs:
    they count as the products that would take as long.
    """
    from nsa.model.count import flops_per_token  # late: imports torch

    step = flops_per_token(model.config, batch.seq_len, dense_equivalent=kind == "dense")
    head = 3 * 2 * model.embedding  # a backward pass costs two forward passes
    layers = (step - head) / 3  # their forward pass
    fraction = {"none": 0.0, "selective": ELEMENTWISE_FRACTION}.get(batch.checkpointing, 1.0)
    if model.teacher is not None:  # its forward pass, and this model's head a second time
        step += flops_per_token(model.teacher, batch.seq_len) / 3 + head
    return step + fraction * layers


@dataclass(frozen=True)
class Hardware:
    """Speed of GPUs and links."""

    flops: float  # dense peak in the training dtype, 1/s
    mfu: float | None  # fraction of the peak that a GPU reaches; None: MFU, or the host's time
    link: float  # bytes/s from one GPU to its neighbour
    network: float = math.inf  # bytes/s from one node to the next
    nodes: int = 1
    memory: float = math.inf  # bytes of a GPU
    latency: float = 20e-6  # seconds per collective, times log2(ranks)


@dataclass(frozen=True)
class Forecast:
    """One step of one setting, after the dense steps."""

    memory: Memory
    traffic: Traffic
    compute: float  # seconds
    communication: float  # seconds, hidden or exposed
    exposed: float  # seconds of communication that no computation hides
    tokens: int  # per step, over all ranks
    dense_steps: int  # first steps
    dense_seconds: float  # of each

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def days(self, steps: int) -> float:
        dense = self.dense_steps * self.dense_seconds
        return (dense + (steps - self.dense_steps) * self.seconds) / 86_400


def forecast(
    model: Model, zero: Zero, batch: BatchShape, hardware: Hardware, ranks: int
) -> Forecast:
    """Return memory, traffic and time of one optimizer step."""
    sent = traffic(model, zero, batch, ranks)

    def times(kind: str) -> tuple[float, float, float]:
        """Return the seconds of computation, of communication, and of its exposed part."""
        micro = micro_batch_seconds(model, batch, hardware, kind)
        communication = communication_seconds(sent, zero, batch, hardware, ranks, micro)
        return micro * batch.accumulation, *communication

    compute, total, exposed = times(model.config.attention.kind)
    dense_compute, _, dense_exposed = times("dense")
    return Forecast(
        memory=memory(model, zero, batch, ranks),
        traffic=sent,
        compute=compute,
        communication=total,
        exposed=exposed,
        tokens=batch.tokens * batch.accumulation * ranks,
        dense_steps=model.dense_steps,
        dense_seconds=dense_compute + dense_exposed,
    )


def micro_batch_seconds(model: Model, batch: BatchShape, hardware: Hardware, kind: str) -> float:
    """Return the seconds of computation of a micro-batch: the GPU's or the host's, the longer."""
    gpu = batch.tokens * flops_with_recomputation(model, batch, kind) / hardware.flops
    if hardware.mfu is not None:
        return gpu / hardware.mfu
    passes = 3 if _recomputes(batch) else 2  # through a layer
    host = HOST_SECONDS[kind] * model.config.layers * passes
    if model.teacher is not None:
        host += HOST_SECONDS["dense"] * model.teacher.layers
    return max(gpu / MFU[kind], host)


def _recomputes(batch: BatchShape) -> bool:
    return batch.checkpointing not in ("none", "selective")


def communication_seconds(
    sent: Traffic, zero: Zero, batch: BatchShape, hardware: Hardware, ranks: int, micro: float
) -> tuple[float, float]:
    """Return total and exposed seconds; `micro`: seconds of computation per micro-batch.

    A ring over several nodes is as fast as its slowest connection, so the slower of link and
    network limits the rate.
    """
    rate = hardware.link if hardware.nodes == 1 else min(hardware.link, hardware.network)
    latency = sent.collectives * hardware.latency * math.log2(ranks) if ranks > 1 else 0.0
    reduce, fetch = sent.reduce / rate, sent.fetch / rate
    blocking = latency + sent.gather / rate
    total = blocking + sent.reductions * (reduce + fetch)
    if not zero.overlap:
        return total, total
    # A backward pass takes as long as two forward passes, or as three with recomputation.
    backward = micro * (3 / 4 if _recomputes(batch) else 2 / 3)
    late = max(sent.tail / rate, reduce - backward)
    if zero.stage == 3:  # weights are prefetched, except the first layer's
        late = max(sent.tail / rate, reduce + fetch - micro)
    return total, min(total, blocking + sent.reductions * late)


def required(memory: Memory) -> float:
    """Return the bytes of GPU memory that a run needs, with CUDA, NCCL and fragmentation."""
    return memory.peak * FRAGMENTATION + RESERVE


def select_auto(
    model: Model, zero: Zero, batch: BatchShape, available: float, ranks: int, *, auto_rows: bool
) -> tuple[BatchShape, list[str]]:
    """Return the batch with the fastest checkpointing mode that fits, and a line on each selection.

    With `auto_rows`, select the fastest mode in which one sequence fits, then the largest
    micro-batch that fits in this mode: recomputation costs more than small micro-batches.
    """
    sequences, auto_mode = batch.micro_batch * batch.accumulation, batch.checkpointing == "auto"
    modes = MODES if auto_mode else (batch.checkpointing,)
    rows = [batch.micro_batch]  # ascending
    if auto_rows:
        rows = [count for count in range(1, sequences + 1) if sequences % count == 0]

    def shape_of(count: int, mode: str) -> BatchShape:
        steps = sequences // count
        return replace(batch, micro_batch=count, accumulation=steps, checkpointing=mode)

    def bytes_of(count: int, mode: str) -> float:
        return required(memory(model, zero, shape_of(count, mode), ranks))

    mode = next((mode for mode in modes if bytes_of(rows[0], mode) <= available), modes[-1])
    count = next((x for x in reversed(rows) if bytes_of(x, mode) <= available), rows[0])
    shape, needed = shape_of(count, mode), bytes_of(count, mode)
    enough = needed <= available
    reason = f"needs about {needed / 1e9:.1f} of {available / 1e9:.1f} GB"
    lines = []
    if auto_rows:
        unit = "sequence" if count == 1 else "sequences"
        each = f"{count} {unit}, accumulation {shape.accumulation}"
        lines = [f"micro-batch: {each} ({reason}{'' if enough else ', so it does not fit'})"]
    if auto_mode:
        others = ", ".join(
            f"{other} would need {bytes_of(count, other) / 1e9:.1f}"
            for other in MODES
            if other != mode
        )
        reason += f"; {others}; CUDA, NCCL and fragmentation included"
        if not enough:
            reason += "; does not fit: lower train.micro_batch"
        lines.append(f"activation checkpointing: {mode} ({reason})")
    return shape, lines
