"""Bytes of tensors on one GPU: what lies there always, and the moments at which it is most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from nsa.planner.model import Activations, Batch, Model, activations
from nsa.planner.traffic import Zero


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, by what they are for."""

    always: Mapping[str, int]  # what lies there between steps
    moments: Mapping[str, Mapping[str, int]]  # what comes on top of it, and when

    @property
    def between(self) -> int:
        """What lies there between steps."""
        return sum(self.always.values())

    @property
    def when(self) -> str:
        """The moment of the peak."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def at_peak(self) -> dict[str, int]:
        """All that lies there at that moment."""
        found = Counter(self.always)
        found.update(self.moments[self.when])
        return {name: size for name, size in found.items() if size}

    @property
    def peak(self) -> int:
        return sum(self.at_peak.values())


def memory(model: Model, zero: Zero, batch: Batch, ranks: int, *, fused: bool = True) -> Memory:
    """Tensors alone: CUDA's context, NCCL's buffers and gaps between tensors come on top."""
    count, size = model.parameters, model.weight_bytes
    shards = ranks if zero.stage else 1
    weights = size * count
    if zero.stage == 3:
        weights = size * (-(-(count - zero.persistent) // ranks) + zero.persistent)
    always = {
        "weights": weights,
        "master weights": 4 * count // shards if size == 2 or zero.stage else 0,
        "AdamW's moments": 8 * count // shards,
        "gradients": 4 * count if zero.whole_gradients else 0,  # their sum, in fp32
    }
    buckets = {"buckets": size * zero.bucket * (2 if zero.overlap else 1)}
    gathered = size * (count + min(count, zero.prefetch)) if zero.stage == 3 else 0
    arriving = size * count  # gradients as the backward pass leaves them
    if zero.stage >= 2:
        arriving = zero.accumulate_bytes * count // ranks
    waiting = arriving if batch.accumulation > 1 else 0
    found = activations(model, batch, fused=fused)
    in_passes = {
        "in the loss": {
            "gradients": waiting,
            "activations": model.layers * found.kept_layer + found.shared + found.final,
            "logits and loss": found.loss,
        },
        **{
            moment: {"gradients": gradients, "activations": found.shared + kept, **buckets}
            for moment, kept, gradients in _backward(model, batch, found, waiting, arriving)
        },
    }
    for parts in in_passes.values():
        parts["gathered weights"] = gathered
    reduced = {"gradients": arriving + _to_reduce(model, zero, arriving), **buckets}
    updated = {"gradients": _to_step(model, zero, ranks), **buckets}
    after = {"while gradients are reduced": reduced, "while weights are updated": updated}
    return Memory(always, in_passes | after)


def _backward(
    model: Model, batch: Batch, found: Activations, waiting: int, arriving: int
) -> list[tuple[str, int, int]]:
    """Activations and gradients at each moment: first all of those are there, last all of these.

    The head's gradient waits, from the loss on, for the embedding's, to which it is added.
    """
    head = model.weight_bytes * model.embedding
    kept = model.layers * found.kept_layer
    before = waiting if arriving < model.weight_bytes * model.parameters else 0
    arrived = arriving * (model.layers - 1) * model.layer // model.parameters
    return [
        ("as the backward pass begins", kept + found.final, waiting + found.in_head),
        ("in the last norm's backward pass", kept + found.final, waiting + found.in_norm + head),
        ("in the last layer's backward pass", kept + found.again, waiting + found.in_layer + head),
        (
            "in the first layer's backward pass",
            found.kept_layer + found.again,
            before + arrived + found.in_layer + head,
        ),
        ("as the backward pass ends", found.kept_layer, before + arriving + 2 * head),
    ]


def _to_reduce(model: Model, zero: Zero, arriving: int) -> int:
    """Copies in one piece, in the dtype of the link."""
    if zero.stage >= 2:
        return arriving
    if zero.bucket:
        return 0
    flat = zero.accumulate_bytes * model.parameters
    sent = zero.reduce_bytes * model.parameters
    return flat + (sent if zero.reduce_bytes != zero.accumulate_bytes else 0)


def _to_step(model: Model, zero: Zero, ranks: int) -> int:
    """Gradients as they lie, once more in one piece, and that in fp32."""
    if zero.stage == 0:
        return (model.weight_bytes + 4) * model.parameters
    if zero.whole_gradients:
        return (model.weight_bytes + 2) * model.parameters
    return (2 * zero.accumulate_bytes + 4) * model.parameters // ranks
