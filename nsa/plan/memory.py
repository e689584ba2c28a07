"""Bytes of tensors on one GPU: what lies there always, and the moments at which it is most."""

from __future__ import annotations

from dataclasses import dataclass

from nsa.plan.model import Activations, Batch, Model, activations
from nsa.plan.traffic import Zero


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. `peak` is the largest of the moments, each of which counts it all."""

    weights: int
    master: int  # in fp32
    moments: int  # AdamW's
    summed: int  # fp32 gradients that BF16_Optimizer keeps for good
    gradients: int  # as the backward pass leaves them
    buckets: int
    activations: int
    loss: int  # logits and the head's gradient
    at_loss: int
    at_backward: int
    at_reduce: int
    at_step: int

    @property
    def always(self) -> int:
        """What lies there between steps."""
        return self.weights + self.master + self.moments + self.summed

    @property
    def peak(self) -> int:
        return max(self.at_loss, self.at_backward, self.at_reduce, self.at_step)

    @property
    def when(self) -> str:
        """The moment of the peak."""
        moments = {
            "in the loss": self.at_loss,
            "in the backward pass": self.at_backward,
            "while gradients are reduced": self.at_reduce,
            "while the weights are updated": self.at_step,
        }
        return max(moments, key=moments.__getitem__)


def memory(model: Model, zero: Zero, batch: Batch, ranks: int, *, fused: bool = True) -> Memory:
    """Tensors alone: CUDA's context, NCCL's buffers and gaps between tensors come on top."""
    count, size = model.parameters, model.weight_bytes
    shards = ranks if zero.stage else 1
    weights = size * count
    if zero.stage == 3:
        weights = size * (-(-(count - zero.persistent) // ranks) + zero.persistent)
    master = 4 * count // shards if size == 2 or zero.stage else 0
    moments = 8 * count // shards
    summed = 4 * count if zero.whole_gradients else 0
    buckets = size * zero.bucket * (2 if zero.overlap else 1)
    always = weights + master + moments + summed
    arriving = size * count  # gradients as the backward pass leaves them
    if zero.stage >= 2:
        arriving = zero.accumulate_bytes * count // ranks
    waiting = arriving if batch.accumulation > 1 else 0
    found = activations(model, batch, fused=fused)
    kept = model.layers * found.kept_layer + found.shared + found.final
    gathered = size * (count + min(count, zero.prefetch)) if zero.stage == 3 else 0
    return Memory(
        weights=weights,
        master=master,
        moments=moments,
        summed=summed,
        gradients=arriving,
        buckets=buckets,
        activations=kept,
        loss=found.loss,
        at_loss=always + waiting + kept + gathered + found.loss,
        at_backward=always + buckets + gathered + _backward(model, batch, found, waiting, arriving),
        at_reduce=always + buckets + arriving + _to_reduce(model, zero, arriving),
        at_step=always + buckets + _to_step(model, zero, ranks),
    )


def _backward(model: Model, batch: Batch, found: Activations, waiting: int, arriving: int) -> int:
    """Where it begins all activations are there, where it ends all gradients.

    The head's gradient waits, from the loss on, for the embedding's, to which it is added.
    """
    head = model.weight_bytes * model.embedding
    kept = waiting + model.layers * found.kept_layer
    in_layer = found.again + found.in_layer
    before = waiting if arriving < model.weight_bytes * model.parameters else 0
    arrived = arriving * (model.layers - 1) * model.layer // model.parameters
    return found.shared + max(
        kept + found.final + found.in_head,
        kept + found.final + found.in_norm + head,
        kept + in_layer + head,
        before + arrived + found.kept_layer + in_layer + head,
        before + arriving + found.kept_layer + 2 * head,
    )


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
