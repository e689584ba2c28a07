"""Memory of one GPU: static tensors, and the phases of a step in which memory can peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from nsa.planner.inputs import BatchShape, Model, Zero


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank's tensors, by purpose."""

    static: Mapping[str, int]  # held between steps
    phases: Mapping[str, Mapping[str, int]]  # on top of `static`, by phase of the step

    @property
    def peak_phase(self) -> str:
        """Phase with the most memory."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def at_peak(self) -> dict[str, int]:
        total = Counter(self.static)
        total.update(self.phases[self.peak_phase])
        return {name: size for name, size in total.items() if size}

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
        weights = size * (-(-(count - zero.persistent) // ranks) + zero.persistent)
    static = {
        "weights": weights,
        "master weights": 4 * count // shards if size == 2 or zero.stage else 0,
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
    # A micro-batch's sharded gradients are added to the earlier sum only when all are complete.
    earlier_sum = accumulated if zero.stage >= 2 else 0
    layers = model.config.layers
    of_all_layers_but_one = gradients * (layers - 1) * model.layer // model.parameters
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
            "gradients": max(accumulated, earlier_sum + of_all_layers_but_one),
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
    """Return the bytes of the gradients' flat copies, in the dtypes of their sum and reduction."""
    if zero.stage >= 2:
        return gradients
    if zero.bucket:
        return 0
    flat = zero.accumulate_bytes * model.parameters
    sent = zero.reduce_bytes * model.parameters
    return flat + (sent if zero.reduce_bytes != zero.accumulate_bytes else 0)


def _update_copies(model: Model, zero: Zero, ranks: int) -> int:
    """Return the bytes of the gradients and their copies, flat and in fp32, during the update."""
    if zero.stage == 0:
        return (model.weight_bytes + 4) * model.parameters
    if zero.bf16_optimizer:
        return (model.weight_bytes + 2) * model.parameters
    return (2 * zero.accumulate_bytes + 4) * model.parameters // ranks
